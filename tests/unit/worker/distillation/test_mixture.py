"""Composition of distillation rounds, choice of the best round and the stopping rule."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.distillation.mixture import (
    MOST_REPLAY,
    Line,
    Weighted,
    best_of,
    compose,
    has_stalled,
    mix_pace,
    replay_share,
    worst_fall,
)

WEIGHTS = {"new": 1.0}


def text(domain: str, length: int) -> Conversation:
    empty = torch.empty(length + 4, 0)
    return Conversation(torch.zeros(length + 4, dtype=torch.int32), empty, empty, 4, 0.0, domain)


def tokens(conversations: list[Conversation]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in conversations:
        found[one.domain] += len(one.tokens_N) - one.answer_start
    return found


def line(new: float, old: float = 2.0, step: int = 0) -> Line:
    return Line(step, {"new": new}, {"old": old}, old)


def test_half_is_replayed_and_domains_have_equal_parts() -> None:
    captured = [Weighted(text("new", 50), 1.0) for _ in range(400)]
    replay = [text("big", 40) for _ in range(900)] + [text("small", 20) for _ in range(3)]
    found = tokens(compose(captured, replay, share=0.5, tokens=8000, seed=0, number=0))
    assert found["new"] == pytest.approx(4000, abs=60)
    assert found["big"] == pytest.approx(2000, abs=60)
    assert found["small"] == pytest.approx(2000, abs=60), "what is scarce is taken again"


def test_a_round_is_a_function_of_seed_and_number() -> None:
    captured = [Weighted(text("new", 10 + i), 1.0) for i in range(50)]
    replay = [text("old", 10 + i) for i in range(50)]
    rounds = [compose(captured, replay, share=0.5, tokens=500, seed=0, number=n) for n in (0, 1, 0)]
    assert [map(id, rounds[0])] != [map(id, rounds[1])]
    assert list(map(id, rounds[0])) == list(map(id, rounds[2])) != list(map(id, rounds[1]))


def test_without_anything_to_replay_all_is_captured() -> None:
    found = tokens(compose([Weighted(text("new", 10), 1.0)], [], share=0.5, tokens=100, seed=0, number=0))
    assert found == {"new": 100}


def test_conversations_that_stand_for_many_come_more_often() -> None:
    captured = [Weighted(text("rare", 10), 10.0), *[Weighted(text("often", 10), 1.0)] * 10]
    picks = [compose(captured, [], share=0.0, tokens=10, seed=0, number=n)[0].domain for n in range(400)]
    assert 150 < picks.count("rare") < 250


def test_an_old_domain_that_falls_is_replayed_more() -> None:
    assert replay_share([line(1.5)], 0.5) == 0.5
    assert replay_share([line(1.5), line(1.6, old=1.985)], 0.5) == 0.5, "less than one percent"
    assert replay_share([line(1.5), line(1.6, old=1.975)], 0.5) == pytest.approx(0.6)
    assert replay_share([line(1.5), line(1.6, old=1.9), line(1.7, old=1.99)], 0.5) == pytest.approx(0.6)
    assert replay_share([line(1.5), *[line(1.6, old=1.9)] * 9], 0.5) == MOST_REPLAY
    assert replay_share([line(1.5), line(1.6, old=1.9)], 0.0) == 0.0, "who forbids it has none"
    assert worst_fall(Line(0, {}, {"a": 1.9, "b": 1.0}), Line(0, {}, {"a": 2.0, "b": 1.0})) == pytest.approx(0.05)


def test_the_best_round_gains_most_and_costs_no_old_domain() -> None:
    lines = [line(1.5), line(1.7), line(1.9, old=1.5), line(1.6)]
    assert best_of(lines, WEIGHTS) == 1
    assert best_of([line(1.5), line(1.4)], WEIGHTS) == 0, "the deployed draft itself"
    jumped = Line(1, {"new": 1.7}, {"many texts": 2.1, "one text": 1.3}, 2.0)
    assert best_of([Line(0, {"new": 1.5}, {"many texts": 2.0, "one text": 2.0}, 2.0), jumped], WEIGHTS) == 1
    assert best_of([line(1.5), line(1.5)], WEIGHTS) == 0, "a tie leaves things as they are"


def test_no_progress_for_some_rounds_ends_it() -> None:
    rising = [line(1.5 + i / 10) for i in range(5)]
    assert not has_stalled(rising, WEIGHTS, 2)
    assert not has_stalled([line(1.5)], WEIGHTS, 2)
    assert has_stalled([*rising, line(1.9), line(1.9)], WEIGHTS, 2)
    assert not has_stalled([*rising, line(1.9)], WEIGHTS, 2)


def test_the_mix_adds_steps_up() -> None:
    found = Line(0, {"a": 1.0, "b": 2.0}, {})
    assert mix_pace(found, {"a": 0.5, "b": 0.5}) == pytest.approx(1 / 0.75)
    assert mix_pace(found, {"b": 0.5}) == 2.0
    assert mix_pace(Line(0, {}, {}), {"a": 1.0}) == 1.0
