"""Acceptance replay against drafting token by token as an engine does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.training.acceptance import (
    RANKS,
    StepCounts,
    accepted,
    target_token_ranks,
)
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.unroll import make_batch, unroll
from support.training_fixtures import Growing

DEPTH = 4


def drafted(head: Eagle3Head, conversation: Conversation, root: int) -> list[Tensor]:
    """Return the states by depth of a chain from slot ``root``, fed with the text's own tokens after its true slots."""
    attend, tokens = Growing(), conversation.tokens_N.long()
    slots = torch.arange(1, root + 1)
    state = head(head.fuse(conversation.aux_NA[slots - 1]), tokens[slots], slots, attend)[-1:]
    states = [state]
    for slot in range(root + 1, min(root + DEPTH, len(tokens))):
        state = head(state, tokens[slot : slot + 1], torch.tensor([slot]), attend)
        states.append(state)
    return states


@torch.no_grad()
def test_only_slots_with_a_root_in_the_answer_are_valid(head: Eagle3Head, conversations: list[Conversation]) -> None:
    for k, (_, rooted_BA) in enumerate(unroll(head, make_batch(conversations, torch.float32), DEPTH)):
        lengths = [max(0, len(c.tokens_N) - c.answer_start - k) for c in conversations]
        assert rooted_BA.sum(dim=1).tolist() == lengths


@torch.no_grad()
def test_replayed_ranks_equal_a_naive_loop(
    target: CausalLM, head: Eagle3Head, conversations: list[Conversation]
) -> None:
    ranks = target_token_ranks(head, conversations, target.lm_head.weight, DEPTH)
    seen = set()
    for conversation, ranks_IK in zip(conversations, ranks, strict=True):
        wanted = target.logits(conversation.hidden_NE).argmax(dim=-1)
        for i in range(len(conversation.tokens_N) - conversation.answer_start):
            root = conversation.answer_start + i
            states = drafted(head, conversation, root)
            expected = []
            for k, state in enumerate(states):
                order = head.target_ids[head.logits(state)[0].argsort(descending=True)][:RANKS].tolist()
                target_token = int(wanted[root + k])
                expected.append(order.index(target_token) if target_token in order else RANKS)
            expected += [RANKS] * (DEPTH - len(states))
            assert ranks_IK[i].tolist() == expected
            seen.update(expected)
    assert len(seen) > 3, "these weights should show several ranks"


@pytest.mark.parametrize(
    ("shape", "ranks_of_path", "expected"),
    [
        ("chain:3", [0, 0, 0], 3),
        ("chain:3", [0, 1, 0], 1),
        ("chain:3", [8, 0, 0], 0),
        ("tree:2,1", [1, 0, 0], 2),
        ("tree:2,1", [1, 1, 0], 1),
        ("0,0,1", [1, 0, 0], 1),
        ("0,0,1", [0, 0, 0], 2),
        ("none", [0, 0, 0], 0),
    ],
)
def test_accepted_length_follows_the_ranks_of_the_shape(shape: str, ranks_of_path: list[int], expected: int) -> None:
    assert accepted(ranks_of_path, TreeShape.parse(shape)) == expected


def test_walk_continues_after_the_accepted_tokens() -> None:
    tally = StepCounts()
    tally.walk(torch.tensor([[0, 0, 8], [8, 8, 8], [8, 8, 8], [0, 8, 8], [8, 8, 8]]), TreeShape.chain(3))
    # The step from slot 0 accepts two tokens, the one from slot 3 accepts one and reaches the end of the text.
    assert (tally.steps, tally.tokens) == (2, 5)
    assert tally.acceptance == [1.0, 0.5, 0.0]
    assert tally.tokens_per_step == 2.5
