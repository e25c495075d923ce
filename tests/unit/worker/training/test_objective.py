"""The losses against plain formulas: overlap, expected tokens per step, and their sum over the batches of a step."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.prompts import TEMPERATURES, normalisers
from specdecode_worker.training.trainer import (
    LossSettings,
    TrainSettings,
    depth_at,
    loss_of,
    loss_settings_at,
    overlap,
    root_counts,
    soft_cross_entropy,
    target_distribution,
)
from specdecode_worker.training.unroll import make_batch, unroll

DEPTH = 3


def with_normalisers(target: CausalLM, conversations: list[Conversation]) -> list[Conversation]:
    return [
        Conversation(
            c.tokens_N,
            c.aux_NA,
            c.hidden_NE,
            c.answer_start,
            c.temperature,
            c.domain,
            normalisers(c.hidden_NE, target.lm_head.weight, c.answer_start),
        )
        for c in conversations
    ]


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_overlap_and_gradient_equal_autograd(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 50, generator=generator, requires_grad=True)
    wanted = 0.8 * torch.softmax(3 * torch.randn(300, 50, generator=generator), dim=-1)
    weight = torch.rand(300, generator=generator)
    mine = overlap(logits, wanted, temperature)
    (gradient,) = torch.autograd.grad((mine * weight).sum(), logits)
    theirs = torch.minimum(torch.softmax(logits / temperature, dim=-1), wanted).sum(dim=-1)
    (expected,) = torch.autograd.grad((theirs * weight).sum(), logits)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(gradient, expected)


def test_probability_outside_the_draft_vocabulary_has_no_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 50, generator=generator, requires_grad=True)
    wanted = 0.6 * torch.softmax(torch.randn(40, 50, generator=generator), dim=-1)
    (gradient,) = torch.autograd.grad(soft_cross_entropy(logits, wanted, torch.ones(40)), logits)
    theirs = -(torch.log_softmax(logits, dim=-1) * wanted).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, logits)[0])


@torch.no_grad()
def test_acceptance_loss_is_negative_log_expected_tokens(
    target: CausalLM, head: Eagle3Head, conversations: list[Conversation]
) -> None:
    texts, temperature = with_normalisers(target, conversations), 0.6
    batch = make_batch(texts, torch.float32)
    states = [state for state, _ in unroll(head, batch, DEPTH)]
    total = count = 0.0
    for row, text in enumerate(texts):
        answers = len(text.tokens_N) - text.answer_start
        p = torch.softmax(target.logits(text.hidden_NE[text.answer_start :]) / temperature, dim=-1)[:, head.target_ids]
        for root in range(answers):
            expected, path = 1.0, 1.0
            for k in range(min(DEPTH, answers - root)):
                q = torch.softmax(head.logits(states[k][row, root + k]) / temperature, dim=-1)
                path *= float(torch.minimum(p[root + k], q).sum())
                expected += path
            total, count = total - float(torch.tensor(expected).log()), count + 1
    aim = LossSettings(depth=DEPTH, decay=0.8, divergence=0.0, temperature=temperature)
    assert float(loss_of(head, batch, target.lm_head.weight, aim)) == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("divergence", [0.0, 0.5, 1.0])
def test_losses_of_accumulated_batches_sum_to_one_loss(
    target: CausalLM, head: Eagle3Head, conversations: list[Conversation], divergence: float
) -> None:
    aim = LossSettings(depth=DEPTH, decay=0.8, divergence=divergence, temperature=0.8)
    output_VE = target.lm_head.weight
    whole = loss_of(head, make_batch(conversations, torch.float32), output_VE, aim)
    counts = root_counts(conversations, DEPTH)
    parts = [
        loss_of(head, make_batch(half, torch.float32), output_VE, aim, counts)
        for half in (conversations[:2], conversations[2:])
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_normalisers_give_probabilities_over_the_whole_vocabulary(target: CausalLM, head: Eagle3Head) -> None:
    states = torch.randn(700, 32, generator=torch.Generator().manual_seed(4))
    normalisers_RT = normalisers(states, target.lm_head.weight, 5)
    assert normalisers_RT.shape == (700, len(TEMPERATURES))
    assert not normalisers_RT[:5].any()
    for at, temperature in enumerate(TEMPERATURES):
        p = target_distribution(
            states[5:],
            target.lm_head.weight,
            head.target_ids,
            temperature=temperature,
            normaliser_R=normalisers_RT[5:, at],
        )
        expected = torch.softmax(target.logits(states[5:]) / temperature, dim=-1)[:, head.target_ids]
        torch.testing.assert_close(p, expected)


def test_schedule_blends_from_divergence_to_acceptance_and_deepens() -> None:
    settings = TrainSettings(steps=100)
    aims = [loss_settings_at(step / 100, step, settings) for step in range(100)]
    assert aims[0].divergence == 1.0
    assert aims[-1].divergence == pytest.approx(settings.divergence_floor)
    assert [a.divergence for a in aims] == sorted((a.divergence for a in aims), reverse=True)
    assert [a.depth for a in aims] == sorted(a.depth for a in aims)
    assert (aims[0].depth, aims[-1].depth) == (1, 7)
    assert depth_at(0.99, TrainSettings(depth=2)) == 2
    assert {a.temperature for a in aims} == {temperature for temperature, _ in settings.mix}
    assert aims == [loss_settings_at(step / 100, step, settings) for step in range(100)]
    assert {temperature for temperature, _ in settings.mix} <= set(TEMPERATURES)
