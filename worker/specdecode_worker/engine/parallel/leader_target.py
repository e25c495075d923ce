"""Target and KV cache of rank 0, which announce every operation to the other ranks before they run it."""

from __future__ import annotations

from torch import Tensor

from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.parallel.rank_group import RankGroup
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.target_pass import Target, TargetPass
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.models.networks.llama import Llama


class LeaderCache(PagedCache):
    """KV cache of the attention heads of rank 0. All ranks use the same block numbers."""

    def __init__(self, own: PagedCache, group: RankGroup) -> None:
        vars(self).update(vars(own))
        self._ranks = group

    def keep(self, source_slots: Tensor, target_slots: Tensor, *, group: int | None = None) -> None:
        """Move the keys and values of accepted nodes on all ranks. Raise RankLost if another rank ends meanwhile."""
        self._ranks.keep(source_slots, target_slots)
        super().keep(source_slots, target_slots, group=group)


class LeaderTarget(Target):
    """Shard of the target network on rank 0."""

    def __init__(self, model: Llama, cache: PagedCache, state: DeviceState, group: RankGroup) -> None:
        super().__init__(model, LeaderCache(cache, group), state)
        self._ranks = group

    def forward(self, step: TargetPass, reads: TargetStates) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run a pass on all ranks. Raise RankLost if another rank ends meanwhile."""
        self._ranks.forward(step.packed, step.logit_rows_R)
        with self._ranks.collective():
            return super().forward(step, reads)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Compute logits on all ranks: [T, V]. Raise RankLost if another rank ends meanwhile."""
        self._ranks.logits(hidden_TE)
        with self._ranks.collective():
            return super().logits(hidden_TE)

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()
