"""The unrolled pass and acceptance replay against drafting token by token as an engine does."""

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

DEPTH = 4


class Growing:
    """Naive attention: one query at a time attends to all keys received so far, in order."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        outs = []
        for q_HD, k_KD, v_KD in zip(q_THD, k_TKD, v_TKD, strict=True):
            self.keys.append(k_KD)
            self.values.append(v_KD)
            groups = len(q_HD) // len(k_KD)
            keys = torch.stack(self.keys).repeat_interleave(groups, dim=1)  # [S, H, D]
            values = torch.stack(self.values).repeat_interleave(groups, dim=1)
            scores = torch.einsum("hd,shd->hs", q_HD, keys) / q_HD.shape[-1] ** 0.5
            outs.append(torch.einsum("hs,shd->hd", scores.softmax(dim=-1), values))
        return torch.stack(outs)


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
def test_unrolled_states_equal_drafting_step_by_step(head: Eagle3Head, conversations: list[Conversation]) -> None:
    passes = list(unroll(head, make_batch(conversations, torch.float32), DEPTH))
    for row, conversation in enumerate(conversations):
        for root in range(conversation.answer_start, len(conversation.tokens_N)):
            for k, expected in enumerate(drafted(head, conversation, root)):
                at = root + k - conversation.answer_start
                state_BAE, rooted_BA = passes[k]
                assert rooted_BA[row, at]
                torch.testing.assert_close(state_BAE[row, at], expected[0], atol=1e-5, rtol=1e-4)


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
