"""Costs of one block of a draft trial, by task and load bucket. See contract.TrialCost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specdecode_worker.contract import TrialCost, TrialPair

MAX_CELLS = 48
"""Most cells of a reported pair. With it a pair takes at most about 9 KiB of the report."""


class CostCell(NamedTuple):
    """Task, and the plan's bucket indices of concurrency and context."""

    task: str
    concurrency: int
    context: int


@dataclass(slots=True)
class CellSums:
    """Sums over the steps of one cell: duration times decoding sequences in seconds, and emitted tokens."""

    sequence_seconds: float = 0.0
    tokens: int = 0


BlockCells = Mapping[CostCell, CellSums]


class BlockCosts:
    """Accumulator of one block: the requests that were admitted in it, and what their decoding steps cost.

    Requests that ran before the block began are never members, so they neither cost nor count.
    """

    def __init__(self, requests: int) -> None:
        """Start an empty block that is complete after ``requests`` of its members have finished."""
        self._left = requests
        self._members: set[str] = set()
        self._rows: list[tuple[str, int]] = []
        self._cells: dict[CostCell, CellSums] = {}

    @property
    def is_complete(self) -> bool:
        """True once enough members have finished."""
        return self._left <= 0

    @property
    def cells(self) -> BlockCells:
        """Costs so far."""
        return self._cells

    def admit(self, request_id: str) -> None:
        """Make a request that starts to run a member of this block."""
        self._members.add(request_id)

    def add_row(self, request_id: str, task: str, tokens: int) -> None:
        """Add a decoding request of the step that is being collected, with the tokens that it emitted."""
        if request_id in self._members:
            self._rows.append((task, tokens))

    def end_step(self, concurrency: int, context: int, seconds: float) -> None:
        """Attribute the duration of a step to the rows added since the last one."""
        for task, tokens in self._rows:
            sums = self._cells.setdefault(CostCell(task, concurrency, context), CellSums())
            sums.sequence_seconds += seconds
            sums.tokens += tokens
        self._rows.clear()

    def end_request(self, request_id: str, *, emitted: bool) -> None:
        """Remove a request that ends for any reason. A member that emitted a token counts as finished.

        Cancelled requests count too, because the server cancels a request at its stop string.
        """
        if request_id in self._members:
            self._members.remove(request_id)
            self._left -= emitted


def pair_of(index: int, incumbent: BlockCells, candidate: BlockCells) -> TrialPair:
    """Return the costs of a finished pair for the report.

    Beyond MAX_CELLS, cells that weigh least in the comparison are left out on both sides. The weight is symmetric in
    the two blocks, so that the selection favours neither.
    """

    def weight(cell: CostCell) -> tuple[float, int]:
        one, other = (block[cell].tokens if cell in block else 0 for block in (incumbent, candidate))
        return one * other / max(one + other, 1), one + other

    reported = sorted(sorted({*incumbent, *candidate}), key=weight, reverse=True)[:MAX_CELLS]
    sides = (tuple(_cost(cell, block[cell]) for cell in reported if cell in block) for block in (incumbent, candidate))
    return TrialPair(index=index, incumbent=next(sides), candidate=next(sides))


def _cost(cell: CostCell, sums: CellSums) -> TrialCost:
    """Return the reported form of a cell, rounded to keep the report small."""
    return TrialCost(**cell._asdict(), sequence_seconds=float(f"{sums.sequence_seconds:.6g}"), tokens=sums.tokens)
