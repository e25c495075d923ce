"""Draft in its own process: it carries out the messages of the worker with a drafter that is local here.

The process has a DeviceState of its own, with the slots and blocks of the worker's. Every message brings all that its
passes read besides the draft's keys, so nothing but those keys has to last from one message to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.drafts.draft_model import ModelDrafter
from specdecode_worker.engine.drafts.draft_passes import catch_up_runs, causal_pass, roots_of
from specdecode_worker.engine.drafts.draft_progress import DraftProgress
from specdecode_worker.engine.drafts.drafter import draft_trees
from specdecode_worker.engine.drafts.eagle import EagleDrafter
from specdecode_worker.engine.drafts.own_device.draft_messages import Place, Prefill, Propose, ToDraft
from specdecode_worker.engine.finish_rule import FinishRule
from specdecode_worker.engine.ipc.messages import Sampling, Submit
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.step.device_state import STATE_RING_POSITIONS, DeviceState
from specdecode_worker.speculation.sampling.coupling import Coupling
from specdecode_worker.speculation.sampling.params import SamplingParams
from specdecode_worker.speculation.sampling.token_counts import BatchTokens
from specdecode_worker.speculation.trees import Tree, forest_of

_SAMPLING = Sampling(max_tokens=1, seed=0, temperature=0.0)
_SUBMIT = Submit(request_id="", prompt=(0,), sampling=_SAMPLING)
_FINISH = FinishRule.of(_SAMPLING, ())
_GREEDY = SamplingParams(seed=0, temperature=0.0, top_k=0, top_p=1.0)

ServedDrafter = EagleDrafter | ModelDrafter
"""Drafters that can run in a draft process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftServer:
    """Executor of messages on a local drafter, which was built on ``state``. ``vocab_size`` is that of the target."""

    drafter: ServedDrafter
    state: DeviceState
    vocab_size: int

    @torch.inference_mode()
    def run(self, message: ToDraft, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Carry out a message and return the tensors of its answer."""
        match message:
            case Prefill():
                return self._prefill(message, *tensors)
            case Propose():
                return self._propose(message, *tensors)

    def _prefill(
        self, message: Prefill, tokens_T: Tensor, aux_TA: Tensor | None = None, before_BA: Tensor | None = None
    ) -> list[Tensor]:
        """Run the draft over chunks of prompts. Tensors are those of the message."""
        state, begin = self.state, 0
        rows = []
        for b, chunk in enumerate(message.chunks):
            request = self._request(chunk.place)
            request.cached, request.prefilled = chunk.cached_bound, chunk.prefilled
            rows.append(Row(request, chunk.count, start=chunk.first))
            end = begin + chunk.count
            state.tokens_SP[request.slot, chunk.first : chunk.first + chunk.count] = self._here(tokens_T[begin:end])
            if before_BA is not None and chunk.first:
                self._ring[request.slot, (chunk.first - 1) % STATE_RING_POSITIONS] = self._here(before_BA[b])
            begin = end
        states_TA = state.length_S.new_empty(len(tokens_T), 0) if aux_TA is None else self._here(aux_TA)
        self.drafter.prefill(rows, states_TA)
        return []

    def _propose(self, message: Propose, roots_B: Tensor, tokens_T: Tensor, *others: Tensor) -> list[Tensor]:
        """Catch up to the roots and draft the trees. Tensors are those of the message."""
        state, drafter = self.state, self.drafter
        trees = tuple(Tree(one.parents, 1) for one in message.trees)
        rows = [Row(self._request(one.place), 1, tree) for one, tree in zip(message.trees, trees, strict=True)]
        requests, counts = [row.request for row in rows], [one.count for one in message.trees]
        for request, root in zip(requests, roots_B.tolist(), strict=True):
            request.cached = root
            state.set_length(request.slot, root)
        first_B, index_T, slots_T = catch_up_runs(state, requests, counts)
        state.tokens_SP[slots_T, index_T] = self._here(tokens_T)
        if drafter.reads:
            self._ring[slots_T, (index_T - 1) % STATE_RING_POSITIONS] = self._here(others[0])
        for b, text in zip(message.texts, others[bool(drafter.reads) :], strict=True):
            state.tokens_SP[requests[b].slot, : len(text)] = self._here(text)
        packed = causal_pass(state, requests, counts, first_B, drafter.last_position, first_key=drafter.first_key)
        hidden_RE = roots_of(drafter.root_states(slots_T, index_T, packed), counts, range(len(rows)), len(rows))
        forest = forest_of(trees, self._device)
        slots_B = to_device([request.slot for request in requests], self._device)
        texts = BatchTokens(state.tokens_SP, slots_B, state.length_S[slots_B], 1 + max(r.cached for r in requests))
        sampler = Coupling([one.params for one in message.trees], texts, forest, self.vocab_size)
        expand = drafter.pass_by_level(hidden_RE, rows, forest, state, sampler)
        ranked_BNK = draft_trees(rows, forest, state, expand)
        return [] if ranked_BNK is None else [ranked_BNK]

    def _request(self, place: Place) -> Request:
        """Return a request at this place, and write its blocks to the block table."""
        blocks = list(place.blocks)
        columns = list(range(len(blocks)))
        self.state.set_blocks([place.slot] * len(blocks), columns, blocks)
        return Request(
            submit=_SUBMIT,
            sampling_params=_GREEDY,
            finish_rule=_FINISH,
            tokens=[],
            arrived_seconds=0.0,
            slot=place.slot,
            blocks=blocks,
            draft=DraftProgress(start=place.start),
        )

    def _here(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a message on the device of the draft."""
        return tensor.to(self._device)

    @property
    def _ring(self) -> Tensor:
        assert self.state.ring_SRA is not None, "the draft reads no states"
        return self.state.ring_SRA

    @property
    def _device(self) -> torch.device:
        return self.state.length_S.device
