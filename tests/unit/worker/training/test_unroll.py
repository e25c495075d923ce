"""Unrolled passes of drafts of every method, and acceptance replay, equal drafting token by token as an engine does.

Parallel drafts are trained from a part of the roots: COD for P-EAGLE heads, anchors for DFlash heads. Long
conversations are learned from in pieces and in bounded memory; the results are those of one pass.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.drafts import Draft
from specdecode_worker.models.eagle import Eagle3Head, EagleHead, PEagleHead
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.training import acceptance
from specdecode_worker.training import unroll as unrolling
from specdecode_worker.training.acceptance import RANKS, StepCounts, accepted, groups_of, target_token_ranks
from specdecode_worker.training.conversations import Conversation, DataSet, batches, pieces, write_shard
from specdecode_worker.training.heads import new_eagle, new_head
from specdecode_worker.training.rollout import read_states
from specdecode_worker.training.trainer import LossSettings, Trainer, TrainSettings, loss_of, root_counts
from specdecode_worker.training.unroll import (
    RootShare,
    all_roots,
    anchor_share,
    batch_for,
    cod_share,
    logits_of,
    root_count,
    root_share,
    unrolled,
    working_copy,
)
from support.training_fixtures import MAKERS, VOCABULARY, Growing, shaken
from support.worker.dense_attention import block_states

DEPTH = 3


def stepped(draft: Draft, conversation: Conversation, root: int) -> list[Tensor]:
    """Return the logits by depth of a chain from slot ``root``, fed with the text's own tokens."""
    tokens, end = conversation.tokens_N.long(), min(root + DEPTH, len(conversation.tokens_N))
    if isinstance(draft, MedusaHeads):
        return list(draft.logits(conversation.hidden_NE[root - 1 : root]).flatten(0, 1)[: end - root])
    if isinstance(draft, DFlashHead):
        block = torch.cat((tokens[root : root + 1], torch.full((DEPTH,), draft.config.mask_token_id)))
        return list(draft.logits(block_states(draft, conversation.aux_NA[:root], block)[1:]))[: end - root]
    if isinstance(draft, CausalLM):
        return [draft.logits(read_states(draft, tokens[: slot + 1])[1][-1]) for slot in range(root, end)]
    attend, slots = Growing(), torch.arange(1, root + 1)
    read = conversation.hidden_NE if draft.reads.final else conversation.aux_NA
    state = draft(draft.fuse(read[slots - 1]), tokens[slots], slots, attend)[-1:]
    logits = [draft.logits(state)[0]]
    if isinstance(draft, PEagleHead):
        tokens, state = torch.full_like(tokens, draft.config.mask_token_id), draft.mask_state
    for slot in range(root + 1, end):
        state = draft(
            draft.mask_state if isinstance(draft, PEagleHead) else state,
            tokens[slot : slot + 1],
            torch.tensor([slot]),
            attend,
        )
        logits.append(draft.logits(state)[0])
    return logits


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
            expected = []
            for k, logits in enumerate(stepped(head, conversation, root)):
                order = head.target_ids[logits.argsort(descending=True)][:RANKS].tolist()
                target_token = int(wanted[root + k])
                expected.append(order.index(target_token) if target_token in order else RANKS)
            expected += [RANKS] * (DEPTH - len(expected))
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


PARALLEL_DEPTH = 5


@pytest.fixture(params=["peagle", "dflash"])
def draft(request: pytest.FixtureRequest, target: CausalLM) -> Draft:
    """Return a parallel draft with random weights."""
    return shaken(MAKERS[request.param](target, PARALLEL_DEPTH))


@pytest.mark.parametrize(
    ("slots", "share", "counts"),
    [
        (100, cod_share, [100, 70, 49, 34, 24, 19]),
        (10, cod_share, [10, 7, 4, 3, 2, 1]),
        (3, cod_share, [3, 2, 1, 0, 0, 0]),
        (100, anchor_share, [25, 25, 25, 25, 24, 24]),
        (100, all_roots, [100, 99, 98, 97, 96, 95]),
    ],
    ids=["cod", "cod-short", "cod-shortest", "anchors", "all"],
)
def test_number_of_trained_roots(slots: int, share: RootShare, counts: list[int]) -> None:
    assert [root_count(slots, k, share) for k in range(6)] == counts


@torch.no_grad()
def test_trained_roots_are_nested_and_counted(draft: Draft, conversations: list[Conversation]) -> None:
    batch = batch_for(draft, conversations, torch.float32)
    trained = [rooted for _, rooted in unrolled(draft, batch, PARALLEL_DEPTH, sample_seed=3)]
    assert [int(rooted.sum()) for rooted in trained] == root_counts(conversations, PARALLEL_DEPTH, root_share(draft))
    assert sum(int(rooted.sum()) for rooted in trained) < sum(root_counts(conversations, PARALLEL_DEPTH))
    for k in range(1, PARALLEL_DEPTH):
        assert bool((trained[k - 1][:, :-1] | ~trained[k][:, 1:]).all()), "a root trained deeper is trained above"
        assert bool((batch.valid_BA | ~trained[k]).all())


@torch.no_grad()
def test_sampling_does_not_change_the_states_of_trained_roots(draft: Draft, conversations: list[Conversation]) -> None:
    batch = batch_for(draft, conversations, torch.float32)
    whole = list(unrolled(draft, batch, PARALLEL_DEPTH))
    assert [int(rooted.sum()) for _, rooted in whole] == root_counts(conversations, PARALLEL_DEPTH)
    sampled = unrolled(draft, batch, PARALLEL_DEPTH, sample_seed=3)
    for (all_states, rooted), (states, trained) in zip(whole, sampled, strict=True):
        assert bool((rooted | ~trained).all())
        torch.testing.assert_close(states[trained], all_states[trained], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_texts_that_end_at_the_last_position_are_unrolled(draft: Draft, target: CausalLM) -> None:
    """Mask slots lie beyond the end of a text; an engine clamps their positions, which have no row in the tables."""
    count = target.config.max_position_embeddings - 1
    tokens_N = torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(3))
    states = read_states(target, tokens_N)
    texts = [Conversation(tokens_N.int(), *states, start, 0.0, "a") for start in (count - 5, count - 40)]
    passes = list(unrolled(draft, batch_for(draft, texts, torch.float32), PARALLEL_DEPTH))
    assert [int(rooted.sum()) for _, rooted in passes] == root_counts(texts, PARALLEL_DEPTH)
    assert all(bool(states_BAE.isfinite().all()) for states_BAE, _ in passes)


def test_loss_of_a_sample_is_close_to_that_of_all_roots(
    draft: Draft, target: CausalLM, conversations: list[Conversation]
) -> None:
    """The divergence is a mean over roots, so the mean over many samples is the divergence of all roots."""
    batch, output_VE = batch_for(draft, conversations, torch.float32), target.lm_head.weight

    def loss(seed: int | None) -> float:
        counts = root_counts(conversations, PARALLEL_DEPTH, all_roots if seed is None else root_share(draft))
        aim = LossSettings(depth=PARALLEL_DEPTH, decay=0.8, sample_seed=seed)
        return float(loss_of(draft, batch, output_VE, aim, counts).detach())

    sampled = [loss(seed) for seed in range(40)]
    assert sum(sampled) / len(sampled) == pytest.approx(loss(None), rel=0.03)
    assert len(set(sampled)) > 30


@pytest.mark.parametrize("method", MAKERS)
@torch.no_grad()
def test_unrolled_draft_equals_drafting_step_by_step(
    method: str, target: CausalLM, conversations: list[Conversation]
) -> None:
    draft = shaken(MAKERS[method](target, DEPTH))
    passes = list(unrolled(draft, batch_for(draft, conversations, torch.float32), DEPTH))
    for k, (_, rooted_BA) in enumerate(passes):
        lengths = [max(0, len(c.tokens_N) - c.answer_start - k) for c in conversations]
        assert rooted_BA.sum(dim=1).tolist() == lengths, "no other slot has a root in the answer"
    for row, conversation in enumerate(conversations[:3]):
        for root in range(conversation.answer_start, len(conversation.tokens_N)):
            for k, expected in enumerate(stepped(draft, conversation, root)):
                at = root + k - conversation.answer_start
                state_BAE, rooted_BA = passes[k]
                assert rooted_BA[row, at]
                torch.testing.assert_close(logits_of(draft, state_BAE[row, at], k), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", MAKERS)
def test_loss_falls_for_every_method(
    method: str, target: CausalLM, conversations: list[Conversation], tmp_path: Path
) -> None:
    write_shard(tmp_path, 0, conversations * 4)
    settings = TrainSettings(
        steps=40, learning_rate=3e-3, output_rate=1.0, batch_tokens=60, depth=DEPTH, deepen_at=(), mix=((1.0, 1.0),)
    )
    draft = shaken(MAKERS[method](target, DEPTH))
    run = Trainer(draft, target.lm_head.weight, DataSet(tmp_path, validation=1), settings)
    aim = LossSettings(depth=DEPTH, decay=0.8, divergence=0.5)

    def measured() -> float:
        return float(loss_of(run.head, batch_for(run.head, conversations, torch.float32), run.output_VE, aim).detach())

    before = measured()
    for batch in run._batches():
        run.step(batch)
        if run.progress.step == 40:
            break
    assert measured() < 0.95 * before
    assert "tokens_per_step" in run.validate(0.0)


def test_working_copy_shares_the_target_weights(target: CausalLM) -> None:
    eagle3, eagle = new_head(target, torch.arange(64)), new_eagle(target)
    copies = working_copy(eagle3, torch.bfloat16), working_copy(eagle, torch.bfloat16)
    assert isinstance(copies[0], Eagle3Head)
    assert isinstance(copies[1], EagleHead)
    assert copies[0]._shared_embedding[0] is target.model.embed_tokens
    assert copies[1]._target[0] is target
    assert target.lm_head.weight.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in target.parameters())


AIM = LossSettings(depth=DEPTH, decay=0.8, divergence=0.5, sample_seed=4)


@pytest.fixture(params=["eagle3", "peagle", "dflash"])
def learning(request: pytest.FixtureRequest, target: CausalLM) -> Draft:
    """Return a draft with random weights."""
    return shaken(MAKERS[request.param](target, DEPTH)).requires_grad_(True)


def gradients(draft: Draft, conversations: list[Conversation], output_VE: Tensor) -> tuple[float, list[Tensor]]:
    draft.zero_grad()
    loss = loss_of(draft, batch_for(draft, conversations, torch.float32), output_VE, AIM)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), [one.grad.clone() for one in draft.parameters() if one.grad is not None]


def test_attention_in_parts_has_the_same_loss_and_gradients(
    learning: Draft, target: CausalLM, conversations: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, whole = gradients(learning, conversations, target.lm_head.weight)
    calls: list[int] = []
    original = unrolling.checkpoint

    def counted(*args: object, **more: object) -> object:
        calls.append(1)
        return original(*args, **more)

    monkeypatch.setattr(unrolling, "checkpoint", counted)
    monkeypatch.setattr(unrolling, "MOST_SCORES", 6 * 4 * 29 * 5)
    in_parts, parts = gradients(learning, conversations, target.lm_head.weight)
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


def test_batches_depend_on_seed_and_epoch_only(conversations: list[Conversation]) -> None:
    made = [
        [[id(one) for one in batch] for batch in batches(conversations * 9, tokens=60, seed=seed, epoch=epoch)]
        for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert made[0] == made[1]
    assert made[0] not in made[2:]


def test_ranks_of_long_texts_are_those_of_one_pass(
    head: Eagle3Head, target: CausalLM, conversations: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = target_token_ranks(head, conversations, target.lm_head.weight, 3)
    monkeypatch.setattr(acceptance, "_ROWS", 5)
    monkeypatch.setattr(acceptance, "_SLOTS", 40)
    monkeypatch.setattr(unrolling, "MOST_SCORES", 500)
    groups = list(groups_of(conversations))
    assert sorted(len(group) for group in groups) == [1, 1, 1, 1, 2]
    order = {id(one): index for index, one in enumerate(conversations)}
    for group in groups:
        for one, ranks in zip(group, target_token_ranks(head, group, target.lm_head.weight, 3), strict=True):
            assert torch.equal(ranks, whole[order[id(one)]])
