"""Long conversations are learned from in pieces and in bounded memory; the results are those of one pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import Draft
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.training import acceptance, unroll
from specdecode_worker.training.acceptance import groups_of, target_token_ranks
from specdecode_worker.training.conversations import Conversation, batches, pieces
from specdecode_worker.training.trainer import LossSettings, loss_of
from specdecode_worker.training.unroll import batch_for
from support.training_fixtures import MAKERS, shaken

AIM = LossSettings(depth=3, decay=0.8, divergence=0.5, sample_seed=4)


@pytest.fixture(params=["eagle3", "peagle", "dflash"])
def draft(request: pytest.FixtureRequest, target: CausalLM) -> Draft:
    """Return a draft with random weights."""
    return shaken(MAKERS[request.param](target, 3)).requires_grad_(True)


def gradients(draft: Draft, conversations: list[Conversation], output_VE: Tensor) -> tuple[float, list[Tensor]]:
    draft.zero_grad()
    loss = loss_of(draft, batch_for(draft, conversations, torch.float32), output_VE, AIM)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), [one.grad.clone() for one in draft.parameters() if one.grad is not None]


def test_attention_in_parts_has_the_same_loss_and_gradients(
    draft: Draft, target: CausalLM, conversations: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, whole = gradients(draft, conversations, target.lm_head.weight)
    calls: list[int] = []
    original = unroll.checkpoint

    def counted(*args: object, **more: object) -> object:
        calls.append(1)
        return original(*args, **more)

    monkeypatch.setattr(unroll, "checkpoint", counted)
    monkeypatch.setattr(unroll, "MOST_SCORES", 6 * 4 * 29 * 5)
    in_parts, parts = gradients(draft, conversations, target.lm_head.weight)
    assert len(calls) > 4
    assert in_parts == pytest.approx(loss, rel=1e-5)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


def test_pieces_hold_every_answer_token_once_behind_its_whole_text(conversations: list[Conversation]) -> None:
    for conversation in conversations:
        made = list(pieces(conversation, 4))
        answers = [token for one in made for token in one.tokens_N[one.answer_start :].tolist()]
        assert answers == conversation.tokens_N[conversation.answer_start :].tolist()
        for one in made:
            assert torch.equal(one.tokens_N, conversation.tokens_N[: len(one.tokens_N)])
            assert len(one.aux_NA) == len(one.hidden_NE) == len(one.tokens_N)
            assert len(one.tokens_N) - one.answer_start <= 4


def test_batches_hold_no_more_answer_tokens_than_asked_for(conversations: list[Conversation]) -> None:
    for tokens in (5, 16, 100):
        epoch = batches(conversations, tokens=tokens, seed=0, epoch=0)
        for batch in epoch:
            assert len(batch) * max(len(one.tokens_N) - one.answer_start for one in batch) <= tokens
        total = sum(len(one.tokens_N) - one.answer_start for batch in epoch for one in batch)
        assert total == sum(len(one.tokens_N) - one.answer_start for one in conversations)
    known = {id(one) for one in conversations}
    assert {id(one) for batch in epoch for one in batch} == known, "short conversations are whole"


def test_ranks_of_long_texts_are_those_of_one_pass(
    head: Eagle3Head, target: CausalLM, conversations: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = target_token_ranks(head, conversations, target.lm_head.weight, 3)
    monkeypatch.setattr(acceptance, "_ROWS", 5)
    monkeypatch.setattr(acceptance, "_SLOTS", 40)
    monkeypatch.setattr(unroll, "MOST_SCORES", 500)
    groups = list(groups_of(conversations))
    assert sorted(len(group) for group in groups) == [1, 1, 1, 1, 2]
    order = {id(one): index for index, one in enumerate(conversations)}
    for group in groups:
        for one, ranks in zip(group, target_token_ranks(head, group, target.lm_head.weight, 3), strict=True):
            assert torch.equal(ranks, whole[order[id(one)]])
