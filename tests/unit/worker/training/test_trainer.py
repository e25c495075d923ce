"""The trainer resumes exactly after a kill, validates, and stops without progress.

Losses are compared with plain formulas: overlap, expected tokens per step, and their sum over the batches of a step.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from specdecode_worker import files
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.training import evaluation as draft_calibration
from specdecode_worker.training import prompts
from specdecode_worker.training.conversations import Conversation, DataSet, write_shard
from specdecode_worker.training.errors import ResumeMismatch, TrainingError
from specdecode_worker.training.evaluation import FACTORS
from specdecode_worker.training.heads import new_head, new_peagle, prepare_eagle3_head
from specdecode_worker.training.trainer import (
    LossSettings,
    Trainer,
    TrainSettings,
    depth_at,
    learning_rate_factor,
    loss_of,
    loss_settings_at,
    overlap,
    root_counts,
    soft_cross_entropy,
    target_distribution,
    validation_line,
)
from specdecode_worker.training.unroll import make_batch, unroll
from support.training_fixtures import KNOWN

SETTINGS = TrainSettings(steps=12, depth=3, learning_rate=3e-3, batch_tokens=40, validate_every=3600.0)


@pytest.fixture
def recorded(conversations: list[Conversation], tmp_path: Path) -> Path:
    write_shard(tmp_path, 0, conversations * 4)
    return tmp_path


def trainer(
    target: CausalLM, recorded: Path, settings: TrainSettings = SETTINGS, draft: Eagle3Head | None = None
) -> Trainer:
    """Return a trainer of a draft, or of a new head with every other token."""
    trained = draft or new_head(target, KNOWN)
    return Trainer(trained, target.lm_head.weight, DataSet(recorded, validation=2), settings)


def steps(run: Trainer, count: int) -> list[float]:
    return [run.step(batch) for batch in itertools.islice(run._batches(), count)]


def test_head_with_another_vocabulary_can_be_trained_further(target: CausalLM, recorded: Path) -> None:
    first = trainer(target, recorded, replace(SETTINGS, steps=60, deepen_at=()))
    steps(first, 60)
    vocabulary = torch.arange(0, 64, 3)
    head = prepare_eagle3_head(first.master, target, vocabulary)
    rows_VE, common = head.lm_head.weight, [i for i, token in enumerate(vocabulary.tolist()) if token % 2 == 0]
    for i, token in enumerate(vocabulary.tolist()):
        known = first.master.lm_head.weight[token // 2] if i in common else target.lm_head.weight[token]
        assert torch.equal(rows_VE[i], known)
    losses = [steps(trainer(target, recorded, draft=one), 3) for one in (head, new_head(target, vocabulary))]
    assert sum(losses[0]) < sum(losses[1])


@pytest.mark.parametrize("new", [new_head, new_peagle], ids=["eagle3", "peagle"])
def test_restored_run_reaches_identical_weights(
    target: CausalLM, recorded: Path, tmp_path: Path, new: Callable[[CausalLM, torch.Tensor], Eagle3Head]
) -> None:
    """A P-EAGLE head is trained on the same sampled roots again."""
    whole, killed, resumed = (trainer(target, recorded, draft=new(target, KNOWN)) for _ in range(3))
    steps(whole, 12)
    steps(killed, 7)
    killed.save(tmp_path)
    assert resumed.restore(tmp_path)
    assert resumed.progress.step == 7
    steps(resumed, 5)
    for name, tensor in whole.master.state_dict().items():
        assert torch.equal(tensor, resumed.master.state_dict()[name]), name


def test_a_checkpoint_of_other_settings_is_refused(target: CausalLM, recorded: Path, tmp_path: Path) -> None:
    trainer(target, recorded).save(tmp_path)
    with pytest.raises(ResumeMismatch, match="learning_rate"):
        trainer(target, recorded, replace(SETTINGS, learning_rate=1e-4)).restore(tmp_path)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    target: CausalLM, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power must not leave an empty checkpoint in place of the last one."""
    order: list[Path] = []
    monkeypatch.setattr(files, "flush", order.append)
    monkeypatch.setattr(os, "replace", lambda partial, path: order.append(path))
    trainer(target, recorded).save(tmp_path)
    assert order == [tmp_path / "checkpoint.pt.partial", tmp_path / "checkpoint.pt"]


def test_run_ends_with_its_best_weights(
    target: CausalLM, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([1.1, 1.5, 1.4, 1.3])
    monkeypatch.setattr(
        "specdecode_worker.training.trainer.validation_line", lambda *_: {"tokens_per_step": next(scores)}
    )
    run = trainer(target, recorded, replace(SETTINGS, steps=4, validate_every=0.0))
    best: list[torch.Tensor] = []
    run.run(tmp_path, lambda _: None, lambda draft: best.append(draft.lm_head.weight.detach().clone()))  # type: ignore
    assert [line["tokens_per_step"] for line in run.progress.history] == [1.1, 1.5, 1.4, 1.3]
    assert len(best) == 2
    assert torch.equal(run.master.lm_head.weight, best[1])
    resumed = trainer(target, recorded, run.settings)
    assert resumed.restore(tmp_path)
    assert resumed.share_done == 1
    resumed.run(tmp_path, lambda _: None, lambda _: None)
    assert torch.equal(resumed.master.lm_head.weight, best[1]), "a killed run remembers its best"


def test_suspended_time_is_not_counted_as_training_time(
    target: CausalLM, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 600.0 if run.progress.step == 25 else 0.5
        return now[0]

    run = trainer(target, recorded, replace(SETTINGS, steps=30))
    monkeypatch.setattr("specdecode_worker.training.trainer.time.monotonic", clock)
    steps(run, 30)
    assert 30 * 0.5 < run.progress.seconds < 30 * 0.5 + 10 * 0.6


def test_validation_reports_each_domain(target: CausalLM, recorded: Path) -> None:
    run = trainer(target, recorded)
    steps(run, 1)
    run.data.validation = run.data.training[:8]
    line = validation_line(run.head, run.data.validation, run.output_VE)
    assert set(line["domains"]) == {"code", "prose"}
    assert all(len(part["acceptance"]) == 3 for part in line["domains"].values())
    parts = [part["tokens_per_step"] for part in line["domains"].values()]
    assert min(parts) <= line["tokens_per_step"] <= max(parts)
    assert line["divergence"] > 0


def test_validation_conversations_per_domain_are_limited(conversations: list[Conversation], tmp_path: Path) -> None:
    renamed = [replace(c, tokens_N=c.tokens_N + i % 3, temperature=0.0) for i, c in enumerate(conversations * 9)]
    write_shard(tmp_path, 0, renamed)
    data = DataSet(tmp_path, validation=5, per_domain=2)
    data.grow()
    assert sorted(c.domain for c in data.validation) == ["code", "code", "prose", "prose"]


@pytest.mark.parametrize("mass", [1.0, 0.6])
def test_soft_cross_entropy_and_gradient_equal_torch(mass: float) -> None:
    """Probability outside the draft's vocabulary, which leaves less than 1 of it, has no gradient."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 50, generator=generator, requires_grad=True)
    wanted = mass * torch.softmax(torch.randn(300, 50, generator=generator), dim=-1)
    weight = torch.rand(300, generator=generator)
    mine = 2 * soft_cross_entropy(logits, wanted, weight)
    (gradient,) = torch.autograd.grad(mine, logits)
    theirs = 2 * (F.cross_entropy(logits, wanted, reduction="none") * weight).sum()
    (expected,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(gradient, expected)


def test_soft_targets_are_renormalised_over_the_draft_vocabulary(target: CausalLM, head: Eagle3Head) -> None:
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(4))
    probabilities = target_distribution(states, target.lm_head.weight, head.target_ids)
    whole = torch.softmax(target.logits(states), dim=-1)[:, head.target_ids]
    torch.testing.assert_close(probabilities, whole / whole.sum(dim=-1, keepdim=True))


def test_empty_data_set_is_refused(target: CausalLM, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="record more tokens"):
        steps(trainer(target, tmp_path), 1)


def test_validation_set_is_greedy_and_disjoint_from_training(recorded: Path, conversations: list[Conversation]) -> None:
    data = DataSet(recorded, validation=2)
    data.grow()
    assert [c.temperature for c in data.validation] == [0.0] * 2
    asked = {tuple(c.tokens_N[: c.answer_start].tolist()) for c in data.validation}
    assert not asked & {tuple(c.tokens_N[: c.answer_start].tolist()) for c in data.training}


def test_new_shards_join_at_the_next_epoch(target: CausalLM, recorded: Path, conversations: list[Conversation]) -> None:
    run = trainer(target, recorded)
    steps(run, 1)
    write_shard(recorded, 1, [replace(c, tokens_N=(c.tokens_N + 1) % 64) for c in conversations])
    before = len(run.data.training)
    for _ in run._batches():
        if run.progress.epoch == 1:
            break
    assert len(run.data.training) == before + len(conversations)
    assert run.progress.shards == 2


def test_perfect_draft_agrees_without_calibration() -> None:
    generator = torch.Generator().manual_seed(6)
    logits, noise = 3 * torch.randn(400, 30, generator=generator), torch.randn(400, 30, generator=generator)
    drawn, ids = (logits + noise).argmax(dim=-1), torch.arange(30)
    assert draft_calibration._hits(logits, noise, ids, drawn)[FACTORS.index(1.0)] == 400
    # A factor of two corrects a draft with half the target's logits.
    assert int(draft_calibration._hits(logits / 2, noise, ids, drawn).argmax()) == FACTORS.index(2.0)


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate_factor(share / 100, SETTINGS) for share in range(101)]
    assert rates[0] < 0.1
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(SETTINGS.final_rate)
    assert rates[3:] == sorted(rates[3:], reverse=True)


DEPTH = 3


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


@torch.no_grad()
def test_acceptance_loss_is_negative_log_expected_tokens(
    target: CausalLM, head: Eagle3Head, conversations: list[Conversation]
) -> None:
    output_VE, temperature = target.lm_head.weight, 0.6
    texts = [
        replace(c, normalisers_NT=prompts.normalisers(c.hidden_NE, output_VE, c.answer_start)) for c in conversations
    ]
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
    assert float(loss_of(head, batch, output_VE, aim)) == pytest.approx(total / count, abs=1e-5)


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
    normalisers_RT = prompts.normalisers(states, target.lm_head.weight, 5)
    assert normalisers_RT.shape == (700, len(prompts.TEMPERATURES))
    assert not normalisers_RT[:5].any()
    for at, temperature in enumerate(prompts.TEMPERATURES):
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
    assert {temperature for temperature, _ in settings.mix} <= set(prompts.TEMPERATURES)
