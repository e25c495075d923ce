"""Tests of the target states that drafts read: order, final state, several drafts per pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.target_states import TargetStates
from support.worker.dense_attention import dense

TOKENS = torch.randint(0, 97, (9,), generator=torch.Generator().manual_seed(4))


def read(target: CausalLM, dense: Any, reads: TargetStates) -> Tensor:
    states = target(TOKENS, torch.arange(len(TOKENS)), dense, reads).aux_TA
    assert isinstance(states, Tensor)
    return states


def test_no_states_are_returned_unless_requested(target: CausalLM) -> None:
    assert target(TOKENS, torch.arange(len(TOKENS)), dense).aux_TA is None
    assert not TargetStates()
    assert TargetStates().width(32) == 0


def test_states_come_in_the_order_asked_for(target: CausalLM) -> None:
    rising, falling = read(target, dense, TargetStates((1, 4))), read(target, dense, TargetStates((4, 1)))
    assert torch.equal(rising.unflatten(-1, (2, 32)).flip(1).flatten(1), falling)
    assert torch.equal(read(target, dense, TargetStates((1, 1))), rising[:, :32].repeat(1, 2))


def test_final_state_is_normed_and_last(target: CausalLM) -> None:
    states = read(target, dense, TargetStates((0, 5), final=True))
    assert states.shape == (9, TargetStates((0, 5), final=True).width(32)) == (9, 96)
    assert torch.equal(states[:, :32], target.model.embed_tokens(TOKENS))
    assert torch.equal(target.model.norm(states[:, 32:64]), states[:, 64:])
    assert torch.equal(states[:, 64:], target(TOKENS, torch.arange(9), dense).hidden_TE)


@pytest.mark.parametrize(
    "part",
    [TargetStates((3, 1)), TargetStates((), final=True), TargetStates((2,), final=True), TargetStates((1, 1))],
    ids=str,
)
def test_states_of_one_draft_are_selected_from_a_shared_pass(part: TargetStates, target: CausalLM) -> None:
    whole = part | TargetStates((2, 0), final=True)
    assert whole.layers == tuple(sorted(set(whole.layers)))
    pieces = read(target, dense, whole).unflatten(-1, (-1, 32))[:, list(whole.indices_of(part))]
    assert torch.equal(pieces.flatten(1), read(target, dense, part))
