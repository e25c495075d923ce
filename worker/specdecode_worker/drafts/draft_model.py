"""Drafter of the method draft-model: a second, smaller language model.

It reads tokens only, no target states, so it can always catch up. Draft slot i holds the keys of token i. In each step
the slots of recently accepted tokens run again, in one pass that ends at the root. The keys of an accepted chain would
already be in place, but those of a tree are not; and one pass costs about as much as a single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.core.device_state import DeviceState, PackedBatch, PackedTensors, PagedCache
from specdecode_worker.core.request import Request, Row
from specdecode_worker.drafts.base import CapturedDrafter, DraftContext, PagedDrafter, Ranking
from specdecode_worker.models.causal_lm import CausalLM

LONGEST_CATCH_UP = 1024
"""Maximum number of tokens that the draft catches up with in one step.

A draft that lags further restarts with the last tokens of the text, so that no step waits for a long prompt.
"""


class TextDrafter(PagedDrafter):
    """Paged drafter that reads tokens alone, so that slot i belongs to token i."""

    def ready(self, request: Request) -> bool:
        """Return whether the request is still within the positions that the draft model supports."""
        return request.cached_min <= self.last_position

    def catch_up_counts(self, requests: Sequence[Request]) -> list[int]:
        """Return the number of slots up to the root to run for each request, at most LONGEST_CATCH_UP."""
        backlogs = (request.draft_backlog(0, self.progress(request)) for request in requests)
        return [min(backlog, LONGEST_CATCH_UP) for backlog in backlogs]


class ModelDrafter(TextDrafter, CapturedDrafter):
    """Drafter of the method draft-model."""

    def __init__(
        self, model: CausalLM, vocab_size: int, cache: PagedCache, state: DeviceState, sharpness: Sequence[float] = ()
    ) -> None:
        """Create a drafter. ``vocab_size`` is that of the target; padding ids beyond it are never proposed."""
        self._model, self._state = model, state
        self.kv_cache = self._cache = cache
        self._vocab_size = vocab_size
        self.first_slot, self.last_position = 0, model.config.max_position_embeddings - 1
        self._ranking = Ranking(None, sharpness)

    @classmethod
    def of(cls, model: CausalLM, context: DraftContext) -> Self:
        """Create the drafter of a loaded model."""
        cache = context.make_cache(model.config)
        return cls(model, context.vocab_size, cache, context.state, context.sharpness)

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Run the draft model over prefill chunks. ``aux_TA`` is not used."""
        first_B = to_device([row.start for row in rows], self._state.length_S.device)
        requests, counts = [row.request for row in rows], [row.count for row in rows]
        self._forward(self.causal_pass(requests, counts, first_B))
        self.record_prefill(rows)

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the draft's hidden states [T, E] at committed slots."""
        return self._forward(packed)

    def node_states(self, hidden_RE: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the draft's hidden states [R, E] at tree nodes. ``hidden_RE`` is not used; the model reads tokens."""
        return self._forward(packed)

    def logits(self, hidden_RE: Tensor, depth: int) -> Tensor:
        """Return the logits of the target's tokens behind these states, [R, V]."""
        return self._model.logits(hidden_RE)[:, : self._vocab_size]

    def _forward(self, packed: PackedBatch | PackedTensors) -> Tensor:
        return self._model(packed.tokens_T, packed.positions_T, self._cache.attend(packed)).hidden_TE  # type: ignore[no-any-return]
