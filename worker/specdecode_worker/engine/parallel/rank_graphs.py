"""Captured steps of a rank other than 0: the target's part of each step of rank 0, with the collectives inside."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.engine.errors import RankLost
from specdecode_worker.engine.graphs.capture_backends import StagedBackend, Work
from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.parallel.step_exchange import StepShape, flat_size, unflatten
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.models.configs.target_states import NO_STATES
from specdecode_worker.models.networks import collectives
from specdecode_worker.models.networks.llama import Llama

log = logging.getLogger(__name__)


def problem_of(stage: Callable[[], None]) -> str:
    """Run a stage of a capture, and return the reason if it fails, else nothing. Raise RankLost if a rank ended."""
    try:
        stage()
    except RankLost:
        raise
    except Exception as error:
        log.warning("this rank cannot capture a step", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return ""


class RankStep:
    """Target part of one captured step, over static tensors that the graph of rank 0 fills.

    The collectives are those of rank 0, in the same order: inputs, those of the target, and moves of accepted keys.
    """

    def __init__(self, shape: StepShape, model: Llama, cache: PagedCache, table_SM: Tensor) -> None:
        self._shape, self._model, self._cache, self._table_SM = shape, model, cache, table_SM
        # Before the first broadcast, all tokens are padding of slot 0, whose keys are in the padding block.
        self._flat = torch.zeros(flat_size(shape), dtype=torch.int64, device=table_SM.device)
        self._key_start_B = torch.zeros(shape.rows, dtype=torch.int64, device=table_SM.device)
        self._pairs = torch.zeros(2, shape.rows * shape.depth, dtype=torch.int64, device=table_SM.device)

    def run(self) -> None:
        """Queue the step."""
        collectives.broadcast(self._flat)
        tables = unflatten(self._flat, self._shape, self._table_SM, self._key_start_B)
        Target.run(self._model, self._cache, tables, tables.tokens_T, NO_STATES)
        if self._shape.depth:
            collectives.broadcast(self._pairs)
            self._cache.keep(self._pairs[0], self._pairs[1], group=self._shape.depth)


class RankGraphs:
    """All captured steps of a rank other than 0, by their number in the order in which rank 0 captured its own."""

    def __init__(self, model: Llama, cache: PagedCache, make_backend: Callable[[], StagedBackend]) -> None:
        """Create an empty set. ``make_backend`` is called for the first step that is captured."""
        self._model, self._cache, self._make_backend = model, cache, make_backend
        self._backend: StagedBackend | None = None
        self._table_SM: Tensor | None = None
        self._prepared: RankStep | None = None
        self._captures = 0
        """Number of steps captured since all were last discarded, those discarded one by one included."""
        self._graphs: dict[int, tuple[RankStep, Work]] = {}
        """Steps and their replays. A graph refers to the static tensors of its step and does not keep them alive."""

    def __len__(self) -> int:
        return len(self._graphs)

    def open_table(self, slots: int, columns: int) -> None:
        """Allocate the copy of the block tables of all slots."""
        self._table_SM = torch.zeros(slots, columns, dtype=torch.int64, device=self._cache.data.device)

    def set_blocks(self, entries: tuple[tuple[int, ...], ...]) -> None:
        """Write entries of the block tables: slots, columns and blocks, as in `DeviceState.set_blocks`."""
        assert self._table_SM is not None, "rank 0 opens the table first"
        slots_N, columns_N, blocks_N = to_device(entries, self._table_SM.device)
        self._table_SM[slots_N, columns_N] = blocks_N

    def prepare(self, shape: StepShape) -> None:
        """Build a step and rehearse it without collectives. Raise whatever makes it impossible here."""
        assert self._table_SM is not None, "rank 0 opens the table first"
        self._backend = self._backend or self._make_backend()
        self._prepared = RankStep(shape, self._model, self._cache, self._table_SM)
        with collectives.rehearsal():
            self._backend.warm_up(self._prepared.run)

    def warm_up(self) -> None:
        """Run the prepared step once with the other ranks.

        NCCL connects the ranks here, which may not happen during a capture:
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html
        """
        assert self._backend is not None, "the step is prepared"
        assert self._prepared is not None, "the step is prepared"
        self._backend.warm_up(self._prepared.run)

    def record(self) -> None:
        """Capture the prepared step. Raise whatever makes it impossible here."""
        assert self._backend is not None, "the step is prepared"
        assert self._prepared is not None, "the step is prepared"
        self._graphs[self._captures] = self._prepared, self._backend.record(self._prepared.run)
        self._captures += 1
        self._prepared = None

    def replay(self, number: int) -> None:
        """Queue the captured step of this number."""
        _, replay = self._graphs[number]
        replay()

    def discard(self, number: int) -> None:
        """Discard the captured step of this number."""
        del self._graphs[number]

    def clear(self) -> None:
        """Discard all steps."""
        self._prepared = None
        self._graphs.clear()
        self._captures = 0
        if self._backend is not None:
            self._backend.clear()
