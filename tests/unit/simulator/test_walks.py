"""Walks along recorded ranks: doublings are single steps, and what is accepted is what replay accepts."""

from __future__ import annotations

import numpy as np
import pytest

from specdecode_simulator.records.acceptance_walks import PLAIN, chain, form_of
from specdecode_simulator.records.recordings import Library
from specdecode_worker.contract import TreeShape
from specdecode_worker.training.acceptance import accepted

SHAPES = [TreeShape.chain(1), TreeShape.chain(5), TreeShape.levels(3, 2, 1), TreeShape((0, 0, 1, 1, 2))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_accepts_what_replay_accepts(library: Library, shape: TreeShape) -> None:
    walk = library.records.walk(0.0, form_of(shape.parents))
    roots = np.arange(0, len(library.records.ranks), 97)
    _, sums = walk.advance(roots, 1)
    wanted = [accepted(library.records.ranks[root].tolist(), shape) for root in roots.tolist()]
    assert sums[:, 8].tolist() == wanted


@pytest.mark.parametrize("steps", [1, 7, 64, 127])
def test_many_steps_are_single_steps(library: Library, steps: int) -> None:
    walk = library.records.walk(0.2, chain(3))
    roots = np.array([5, 500, 5000])
    jumped, total = walk.advance(roots, steps)
    alone = np.zeros_like(total)
    for _ in range(steps):
        roots, sums = walk.advance(roots, 1)
        alone = alone + sums
    assert jumped.tolist() == roots.tolist()
    assert total.tolist() == alone.tolist()


def test_plain_steps_go_one_token_and_stay_in_their_answer(library: Library) -> None:
    begin, length = library.records.answers["qa"][3]
    walk = library.records.walk(0.0, PLAIN)
    roots, sums = walk.advance(np.array([begin]), min(length, 127))
    assert sums[0, 8] == 0
    assert begin <= roots[0] < begin + length


def test_quality_moves_acceptance_both_ways_and_requests_differ(library: Library) -> None:
    records = library.records
    means = [records.mean_accepted("qa", quality, chain(3)) for quality in (-0.5, 0.0, 0.5)]
    assert means == sorted(means)
    assert means[2] - means[0] > 0.8
    _, sums = records.walk(0.0, chain(3)).advance(np.array([a for a, _ in records.answers["qa"]]), 32)
    assert np.std(sums[:, 8] / 32) > 0.1, "answers must not all be alike"
