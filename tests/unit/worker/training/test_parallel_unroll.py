"""Conditional drop-token sampling: which roots are trained at which depth, and with which states."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.peagle import PEagleHead
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.heads.initialization import new_peagle
from specdecode_worker.training.heads.parallel_unroll import trained_roots
from specdecode_worker.training.heads.trainable_drafts import batch_for, unrolled
from specdecode_worker.training.optimization.objective import LossSettings, loss_of, root_counts

DEPTH = 5


@pytest.fixture
def peagle(target: Llama) -> PEagleHead:
    head = new_peagle(target, torch.arange(0, 64, 2), layers=2)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


@pytest.mark.parametrize(
    ("slots", "shares"), [(100, [100, 70, 49, 34, 24, 19]), (10, [10, 7, 4, 3, 2, 1]), (3, [3, 2, 1, 0, 0, 0])]
)
def test_deeper_depths_keep_fewer_roots(slots: int, shares: list[int]) -> None:
    assert [trained_roots(slots, k, sampled=False) for k in range(6)] == [max(slots - k, 0) for k in range(6)]
    assert [trained_roots(slots, k, sampled=True) for k in range(6)] == shares


@torch.no_grad()
def test_trained_roots_are_nested_and_counted(peagle: PEagleHead, conversations: list[Conversation]) -> None:
    batch = batch_for(peagle, conversations, torch.float32)
    trained = [rooted for _, rooted in unrolled(peagle, batch, DEPTH, sample_seed=3)]
    assert [int(rooted.sum()) for rooted in trained] == root_counts(conversations, DEPTH, sampled=True)
    assert sum(int(rooted.sum()) for rooted in trained) < sum(root_counts(conversations, DEPTH))
    for k in range(1, DEPTH):
        assert bool((trained[k - 1][:, :-1] | ~trained[k][:, 1:]).all()), (
            "a root that is trained deeper is trained above"
        )
        assert bool((batch.valid_BA | ~trained[k]).all())


@torch.no_grad()
def test_dropping_roots_does_not_change_the_states_of_others(
    peagle: PEagleHead, conversations: list[Conversation]
) -> None:
    batch = batch_for(peagle, conversations, torch.float32)
    whole = list(unrolled(peagle, batch, DEPTH))
    for (all_states, rooted), (states, trained) in zip(
        whole, unrolled(peagle, batch, DEPTH, sample_seed=3), strict=True
    ):
        assert bool((rooted | ~trained).all())
        torch.testing.assert_close(states[trained], all_states[trained], atol=1e-5, rtol=1e-4)


def test_each_seed_trains_other_roots(peagle: PEagleHead, conversations: list[Conversation]) -> None:
    batch = batch_for(peagle, conversations, torch.float32)
    trained = [
        [rooted.flatten().tolist() for _, rooted in unrolled(peagle, batch, DEPTH, sample_seed=seed)]
        for seed in (3, 3, 4)
    ]
    assert trained[0] == trained[1]
    assert trained[0] != trained[2]


def test_loss_of_a_sample_is_close_to_that_of_all_roots(
    peagle: PEagleHead, target: Llama, conversations: list[Conversation]
) -> None:
    """The divergence is a mean over roots, so the mean over many samples is the divergence of all roots."""
    batch, output_VE = batch_for(peagle, conversations, torch.float32), target.lm_head.weight

    def loss(seed: int | None) -> float:
        counts = root_counts(conversations, DEPTH, sampled=seed is not None)
        aim = LossSettings(depth=DEPTH, decay=0.8, sample_seed=seed)
        return float(loss_of(peagle, batch, output_VE, aim, counts).detach())

    sampled = [loss(seed) for seed in range(40)]
    assert sum(sampled) / len(sampled) == pytest.approx(loss(None), rel=0.02)
    assert len(set(sampled)) > 30
