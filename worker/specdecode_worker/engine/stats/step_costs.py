"""Step cost cells: sums from which the operator fits its step time model. See contract.StepCell."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from specdecode_worker.contract import FEATURES, StepCell

CLIP = 4.0
"""Multiple of the running median of a cell at which step times are clipped. Slower steps are due to other load."""
_REMEMBERED = 31
"""Number of recent step times over which the median is taken."""
_LEAST_FOR_CLIP = 8
"""Number of step times of a cell before clipping starts."""

_MOST_PENDING = 64
"""Number of steps that are added to the sums together, because one by one takes 5 us a step."""
_UPPER = np.triu_indices(len(FEATURES))
"""Rows and columns of a symmetric matrix that StepCell lists, row by row."""

CellKey = tuple[int, int, bool, int]
"""Key of a cell: (bucket of packed tokens, draft passes, has prefill, context bucket)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Features of a step, in the order of contract.FEATURES without its first entry, the constant 1."""

    sequences: int
    verify_tokens: int
    kv_tokens: int
    draft_passes: int
    prefill_tokens: int

    def cell_key(self, context_bucket: int) -> CellKey:
        """Return the key of the cell of this step."""
        tokens = self.verify_tokens + self.prefill_tokens
        return 1 << max(tokens - 1, 0).bit_length(), self.draft_passes, self.prefill_tokens > 0, context_bucket

    @property
    def x(self) -> tuple[float, ...]:
        """Feature vector in the order of contract.FEATURES, the constant 1 included."""
        return 1, self.sequences, self.verify_tokens, self.kv_tokens, self.draft_passes, self.prefill_tokens


@dataclass(slots=True)
class _Sums:
    """Sums of one cell, named as in contract.StepCell; ``recent`` holds the latest step times for the median.

    ``x``, ``xx`` and ``xt`` are without the steps in ``pending``, the feature vectors and times of the latest ones.
    """

    count: int = 0
    x: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(FEATURES)))
    xx: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(FEATURES), len(FEATURES))))
    xt: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(FEATURES)))
    pending: list[tuple[float, ...]] = field(default_factory=list)
    t: float = 0.0
    tt: float = 0.0
    device_seconds: float = 0.0
    wall_seconds: float = 0.0
    clipped: int = 0
    emitted: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add(self, size: StepSize, emitted: int, wall_seconds: float, device_seconds: float) -> None:
        seconds = self._clip(wall_seconds)
        self.pending.append((*size.x, seconds))
        if len(self.pending) >= _MOST_PENDING:
            self.add_pending()
        self.count += 1
        self.t += seconds
        self.tt += seconds * seconds
        self.device_seconds += device_seconds
        self.wall_seconds += wall_seconds
        self.emitted += emitted

    def add_pending(self) -> None:
        """Add the pending steps to the sums."""
        if self.pending:
            table = np.array(self.pending)
            x, seconds = table[:, :-1], table[:, -1]
            self.x += x.sum(axis=0)
            self.xx += x.T @ x
            self.xt += x.T @ seconds
            self.pending.clear()

    def _clip(self, seconds: float) -> float:
        bound = CLIP * median(self.recent) if len(self.recent) >= _LEAST_FOR_CLIP else seconds
        self.recent.append(seconds)
        self.clipped += seconds > bound
        return min(seconds, bound)


class StepCosts:
    """Step cost sums of a worker, by cell."""

    def __init__(self) -> None:
        self._cells: dict[CellKey, _Sums] = {}

    def add(
        self, context_bucket: int, size: StepSize, emitted: int, wall_seconds: float, device_seconds: float
    ) -> None:
        """Add one step to its cell. ``emitted`` is the number of tokens that the step emitted."""
        sums = self._cells.setdefault(size.cell_key(context_bucket), _Sums())
        sums.add(size, emitted, wall_seconds, device_seconds)

    def cells(self, most: int) -> tuple[StepCell, ...]:
        """Return the at most ``most`` cells with the most steps, sorted by key. The report size is limited."""
        largest = sorted(self._cells.items(), key=lambda item: -item[1].count)[:most]
        return tuple(_cell(cell_key, sums) for cell_key, sums in sorted(largest))


def _cell(cell_key: CellKey, sums: _Sums) -> StepCell:
    sums.add_pending()
    return StepCell(
        tokens_bucket=cell_key[0],
        draft_passes=cell_key[1],
        prefill=cell_key[2],
        context_bucket=cell_key[3],
        count=sums.count,
        x=_short(sums.x),
        xx=_short(sums.xx[_UPPER]),
        xt=_short(sums.xt),
        t=sums.t,
        tt=sums.tt,
        device_seconds=sums.device_seconds,
        wall_seconds=sums.wall_seconds,
        clipped=sums.clipped,
        emitted=sums.emitted,
    )


def _short(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Round to 10 significant digits.

    This keeps the report small, and differences between two reports accurate enough.
    """
    return tuple(float(f"{value:.10g}") for value in values.tolist())
