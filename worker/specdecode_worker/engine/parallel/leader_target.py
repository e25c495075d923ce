"""Target, KV cache and block tables of rank 0, which announce every operation to the other ranks before they run it.

In a captured step nothing is announced: the collectives are part of the graphs of all ranks (leader_backend.py).
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.parallel.rank_group import RankGroup
from specdecode_worker.engine.parallel.rank_messages import OpenTable, SetBlocks
from specdecode_worker.engine.parallel.step_exchange import StepShape, flatten
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import PackedTensors
from specdecode_worker.engine.step.target_pass import Target, TargetPass
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.models.networks import collectives
from specdecode_worker.models.networks.llama import Llama


class LeaderState(DeviceState):
    """Device state whose block tables the other ranks copy, because their captured steps read them."""

    def __init__(
        self, slots: int, max_model_len: int, dtype: torch.dtype, device: torch.device, group: RankGroup
    ) -> None:
        super().__init__(slots, max_model_len, dtype, device)
        self._ranks = group
        group.send(OpenTable(*self.block_table_SM.shape))

    def set_blocks(self, slots: list[int], columns: list[int], blocks: list[int]) -> None:
        """Write entries of the block tables on all ranks."""
        self._ranks.send(SetBlocks((tuple(slots), tuple(columns), tuple(blocks))))
        super().set_blocks(slots, columns, blocks)


class LeaderCache(PagedCache):
    """KV cache of the attention heads of rank 0. All ranks use the same block numbers."""

    def __init__(self, own: PagedCache, group: RankGroup) -> None:
        vars(self).update(vars(own))
        self._ranks = group

    def keep(self, source_slots: Tensor, target_slots: Tensor, *, group: int | None = None) -> None:
        """Move the keys and values of accepted nodes on all ranks. Raise RankLost if another rank ends meanwhile."""
        self._ranks.keep(source_slots, target_slots)
        self.keep_here(source_slots, target_slots, group)

    def keep_here(self, source_slots: Tensor, target_slots: Tensor, group: int | None) -> None:
        """Move the keys and values of this rank alone."""
        super().keep(source_slots, target_slots, group=group)


class LeaderTarget(Target):
    """Shard of the target network on rank 0."""

    def __init__(self, model: Llama, cache: PagedCache, state: DeviceState, group: RankGroup) -> None:
        self._leader_cache = LeaderCache(cache, group)
        super().__init__(model, self._leader_cache, state)
        self._ranks = group
        self._shape: StepShape | None = None
        """Sizes of the last pass over tables."""

    def forward(self, step: TargetPass, reads: TargetStates) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run a pass on all ranks. Raise RankLost if another rank ends meanwhile."""
        self._ranks.forward(step.packed, step.logit_rows_R)
        with self._ranks.collective():
            return super().forward(step, reads)

    def forward_tables(
        self, tables: PackedTensors, slots_B: Tensor, reads: TargetStates
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass of a captured step, whose other ranks run their graphs of it."""
        self._shape = StepShape(len(slots_B), len(tables.tokens_T), 0)
        collectives.broadcast(flatten(tables, slots_B))
        return super().forward_tables(tables, slots_B, reads)

    def keep_tables(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Move the accepted keys of a captured step, whose other ranks run their graphs of it."""
        assert self._shape is not None, "keys are kept after a pass"
        depth = source_BD.shape[1]
        self._shape = msgspec.structs.replace(self._shape, depth=depth)
        source, target = source_BD.flatten(), target_BD.flatten()
        collectives.broadcast(torch.stack((source, target)))
        self._leader_cache.keep_here(source, target, depth)

    def take_shape(self) -> StepShape | None:
        """Return the sizes of the last pass over tables since the last call, None if there was none."""
        shape, self._shape = self._shape, None
        return shape

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Compute logits on all ranks: [T, V]. Raise RankLost if another rank ends meanwhile."""
        self._ranks.logits(hidden_TE)
        with self._ranks.collective():
            return super().logits(hidden_TE)

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()
