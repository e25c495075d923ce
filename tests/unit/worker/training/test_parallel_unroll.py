"""Roots that parallel drafts are trained from: COD for P-EAGLE heads, anchors for DFlash heads."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import Draft
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.trainer import LossSettings, loss_of, root_counts
from specdecode_worker.training.unroll import (
    RootShare,
    all_roots,
    anchor_share,
    batch_for,
    cod_share,
    root_count,
    root_share,
    unrolled,
)
from support.training_fixtures import MAKERS, shaken

DEPTH = 5


@pytest.fixture(params=["peagle", "dflash"])
def draft(request: pytest.FixtureRequest, target: CausalLM) -> Draft:
    """Return a parallel draft with random weights."""
    return shaken(MAKERS[request.param](target, DEPTH))


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
    trained = [rooted for _, rooted in unrolled(draft, batch, DEPTH, sample_seed=3)]
    assert [int(rooted.sum()) for rooted in trained] == root_counts(conversations, DEPTH, root_share(draft))
    assert sum(int(rooted.sum()) for rooted in trained) < sum(root_counts(conversations, DEPTH))
    for k in range(1, DEPTH):
        assert bool((trained[k - 1][:, :-1] | ~trained[k][:, 1:]).all()), "a root trained deeper is trained above"
        assert bool((batch.valid_BA | ~trained[k]).all())


@torch.no_grad()
def test_sampling_does_not_change_the_states_of_trained_roots(draft: Draft, conversations: list[Conversation]) -> None:
    batch = batch_for(draft, conversations, torch.float32)
    whole = list(unrolled(draft, batch, DEPTH))
    assert [int(rooted.sum()) for _, rooted in whole] == root_counts(conversations, DEPTH)
    sampled = unrolled(draft, batch, DEPTH, sample_seed=3)
    for (all_states, rooted), (states, trained) in zip(whole, sampled, strict=True):
        assert bool((rooted | ~trained).all())
        torch.testing.assert_close(states[trained], all_states[trained], atol=1e-5, rtol=1e-4)


def test_each_seed_trains_other_roots(draft: Draft, conversations: list[Conversation]) -> None:
    batch = batch_for(draft, conversations, torch.float32)
    trained = [
        [rooted.flatten().tolist() for _, rooted in unrolled(draft, batch, DEPTH, sample_seed=seed)]
        for seed in (3, 3, 4)
    ]
    assert trained[0] == trained[1]
    assert trained[0] != trained[2]


def test_loss_of_a_sample_is_close_to_that_of_all_roots(
    draft: Draft, target: CausalLM, conversations: list[Conversation]
) -> None:
    """The divergence is a mean over roots, so the mean over many samples is the divergence of all roots."""
    batch, output_VE = batch_for(draft, conversations, torch.float32), target.lm_head.weight

    def loss(seed: int | None) -> float:
        counts = root_counts(conversations, DEPTH, all_roots if seed is None else root_share(draft))
        aim = LossSettings(depth=DEPTH, decay=0.8, sample_seed=seed)
        return float(loss_of(draft, batch, output_VE, aim, counts).detach())

    sampled = [loss(seed) for seed in range(40)]
    assert sum(sampled) / len(sampled) == pytest.approx(loss(None), rel=0.03)
    assert len(set(sampled)) > 30
