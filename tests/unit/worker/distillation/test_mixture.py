"""Composition of distillation rounds, choice of the best round and the stopping rule."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.distillation.pool import (
    MOST_REPLAY,
    RoundResult,
    Weighted,
    best_of,
    compose,
    has_stalled,
    replay_share,
    tokens_per_step_over_mix,
    worst_old_loss,
)

WEIGHTS = {"new": 1.0}


def text(domain: str, length: int) -> Conversation:
    empty = torch.empty(length + 4, 0)
    return Conversation(torch.zeros(length + 4, dtype=torch.int32), empty, empty, 4, 0.0, domain)


def tokens(conversations: list[Conversation]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for one in conversations:
        counts[one.domain] += len(one.tokens_N) - one.answer_start
    return counts


def result_of(new: float, old: float = 2.0, step: int = 0) -> RoundResult:
    return RoundResult(step, {"new": new}, {"old": old}, old)


def test_replayed_half_has_equal_parts_by_domain() -> None:
    captured = [Weighted(text("new", 50), 1.0) for _ in range(400)]
    replay = [text("big", 40) for _ in range(900)] + [text("small", 20) for _ in range(3)]
    counts = tokens(compose(captured, replay, share=0.5, tokens=8000, seed=0, number=0))
    assert counts["new"] == pytest.approx(4000, abs=60)
    assert counts["big"] == pytest.approx(2000, abs=60)
    assert counts["small"] == pytest.approx(2000, abs=60), "what is scarce is taken again"


def test_round_depends_on_seed_and_number_only() -> None:
    captured = [Weighted(text("new", 10 + i), 1.0) for i in range(50)]
    replay = [text("old", 10 + i) for i in range(50)]
    rounds = [compose(captured, replay, share=0.5, tokens=500, seed=0, number=n) for n in (0, 1, 0)]
    assert [map(id, rounds[0])] != [map(id, rounds[1])]
    assert list(map(id, rounds[0])) == list(map(id, rounds[2])) != list(map(id, rounds[1]))


def test_round_without_replay_is_all_captured() -> None:
    counts = tokens(compose([Weighted(text("new", 10), 1.0)], [], share=0.5, tokens=100, seed=0, number=0))
    assert counts == {"new": 100}


def test_heavier_conversations_are_drawn_more_often() -> None:
    captured = [Weighted(text("rare", 10), 10.0), *[Weighted(text("often", 10), 1.0)] * 10]
    picks = [compose(captured, [], share=0.0, tokens=10, seed=0, number=n)[0].domain for n in range(400)]
    assert 150 < picks.count("rare") < 250


def test_degraded_old_domain_increases_the_replay_share() -> None:
    assert replay_share([result_of(1.5)], 0.5) == 0.5
    assert replay_share([result_of(1.5), result_of(1.6, old=1.985)], 0.5) == 0.5, "less than one percent"
    assert replay_share([result_of(1.5), result_of(1.6, old=1.975)], 0.5) == pytest.approx(0.6)
    assert replay_share([result_of(1.5), result_of(1.6, old=1.9), result_of(1.7, old=1.99)], 0.5) == pytest.approx(0.6)
    assert replay_share([result_of(1.5), *[result_of(1.6, old=1.9)] * 9], 0.5) == MOST_REPLAY
    assert replay_share([result_of(1.5), result_of(1.6, old=1.9)], 0.0) == 0.0, "who forbids it has none"
    assert worst_old_loss(
        RoundResult(0, {}, {"a": 1.9, "b": 1.0}), RoundResult(0, {}, {"a": 2.0, "b": 1.0})
    ) == pytest.approx(0.05)


def test_best_round_gains_most_without_degrading_old_texts() -> None:
    lines = [result_of(1.5), result_of(1.7), result_of(1.9, old=1.5), result_of(1.6)]
    assert best_of(lines, WEIGHTS) == 1
    assert best_of([result_of(1.5), result_of(1.4)], WEIGHTS) == 0, "the deployed draft itself"
    jumped = RoundResult(1, {"new": 1.7}, {"many texts": 2.1, "one text": 1.3}, 2.0)
    assert best_of([RoundResult(0, {"new": 1.5}, {"many texts": 2.0, "one text": 2.0}, 2.0), jumped], WEIGHTS) == 1
    assert best_of([result_of(1.5), result_of(1.5)], WEIGHTS) == 0, "a tie leaves things as they are"


def test_training_stalls_after_rounds_without_progress() -> None:
    rising = [result_of(1.5 + i / 10) for i in range(5)]
    assert not has_stalled(rising, WEIGHTS, 2)
    assert not has_stalled([result_of(1.5)], WEIGHTS, 2)
    assert has_stalled([*rising, result_of(1.9), result_of(1.9)], WEIGHTS, 2)
    assert not has_stalled([*rising, result_of(1.9)], WEIGHTS, 2)


def test_tokens_per_step_over_mix_is_a_harmonic_mean() -> None:
    round_result = RoundResult(0, {"a": 1.0, "b": 2.0}, {})
    assert tokens_per_step_over_mix(round_result, {"a": 0.5, "b": 0.5}) == pytest.approx(1 / 0.75)
    assert tokens_per_step_over_mix(round_result, {"b": 0.5}) == 2.0
    assert tokens_per_step_over_mix(RoundResult(0, {}, {}), {"a": 1.0}) == 1.0
