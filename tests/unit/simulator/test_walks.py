"""Walks along recorded ranks: doublings are single steps, and what is accepted is what replay accepts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdecode_simulator.records.acceptance_walks import BESIDE, PLAIN, Form, chain, form_of
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


def test_sums_below_siblings_are_those_of_a_replay_node_by_node(library: Library) -> None:
    shape = TreeShape((0, 0, 1, 1, 2, 5))
    roots = np.arange(0, len(library.records.ranks), 7)
    _, sums = library.records.walk(0.0, form_of(shape.parents)).advance(roots, 1)
    wanted = np.zeros((len(roots), 7, 2), dtype=int)
    for row, root in enumerate(roots.tolist()):
        node, is_main = 0, True
        for depth, rank in enumerate(library.records.ranks[root].tolist(), start=1):
            children = list(shape.children(node))
            if not is_main and children:
                wanted[row, depth - 2] += (1, rank == 0)
            if rank >= len(children):
                break
            node, is_main = children[rank], is_main and rank == 0
    assert sums[:, BESIDE:].tolist() == wanted.reshape(len(roots), -1).tolist()
    assert wanted[:, 0, 0].sum() > wanted[:, 0, 1].sum() > 0
    assert wanted[:, 1, 0].sum() > 0


def test_survivals_add_up_to_the_accepted_tokens(library: Library) -> None:
    for quality in (-0.2, 0.0, 0.3):
        paths = [(0,), (0, 0), (0, 0, 0), (1,), (1, 0), (2,)]
        found = sum(library.records.survival("qa", quality, path) for path in paths)
        wanted = library.records.mean_accepted("qa", quality, form_of((0, 0, 0, 1, 2, 4)))
        assert found == pytest.approx(wanted, rel=0.02)


def test_ranks_of_misses_follow_the_quality(library: Library) -> None:
    """A draft that is worse misses beyond all ranks; one that is better keeps the ranks of its misses."""
    worse, same, better = (library.records.tail_ranks("qa", quality) for quality in (-0.4, 0.0, 0.4))
    assert worse[0, 0, 1] < 0.9 * same[0, 0, 1]
    assert better[0, 0, 1] == pytest.approx(same[0, 0, 1], abs=0.05)
    assert np.allclose(same.sum(axis=-1), 1)


@pytest.mark.parametrize("form", [chain(3), form_of((0, 0, 1, 2, 3))], ids=["chain", "tree"])
@pytest.mark.parametrize("steps", [1, 7, 64, 127])
def test_many_steps_are_single_steps(library: Library, steps: int, form: Form) -> None:
    walk = library.records.walk(0.2, form)
    roots = np.array([5, 500, 5000])
    jumped, total = walk.advance(roots, steps)
    alone = np.zeros_like(total)
    for _ in range(steps):
        roots, sums = walk.advance(roots, 1)
        alone = alone + sums
    assert jumped.tolist() == roots.tolist()
    assert total.tolist() == alone.tolist()


@pytest.mark.parametrize("doublings", [0, 3, 6])
def test_a_request_ends_with_the_step_that_brings_its_last_token(library: Library, doublings: int) -> None:
    walk = library.records.walk(0.25, chain(3 + doublings // 3))
    while len(walk.jump) <= doublings:
        walk.advance(np.array([0]), 127)
    starts, tokens = np.array([5, 500, 5000, 9000]), np.array([1, 40, 90, 100])
    steps, sums = walk.advance_to(starts, tokens, 100)
    for root, wanted, count, total in zip(starts, tokens.tolist(), steps.tolist(), sums.tolist(), strict=True):
        alone = [walk.advance(np.array([root]), most)[1][0] for most in range(1, count + 1)]
        brought = [most + int(own[8]) for most, own in enumerate(alone, start=1)]
        assert brought[-1] >= wanted
        assert all(before < wanted for before in brought[:-1])
        assert total == alone[-1].tolist()


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


# Tables of step times: recorded cells come back, measured steps come out, and nothing leaves the grid.


def test_recorded_cells_come_back(library: Library, recordings: Path) -> None:
    document = json.loads((recordings / "steps-smollm2-cpu.json").read_text())
    table = library.tables["smollm2-cpu"]
    for cell in document["cells"]:
        if cell["context"] == 128:
            b, d = cell["sequences"], cell["depth"]
            assert table.seconds(b, b * (d + 1), d, b * 128) == pytest.approx(cell["seconds"])


def test_measured_steps_of_a_gpu_come_out_within_the_error_of_the_fit(library: Library, recordings: Path) -> None:
    measured = json.loads((recordings.parent / "results" / "gpu-h200-2026-11-27-third.json").read_text())["rows"]
    steps = [row for row in measured if row["kind"] == "step" and row["graphs"] and not row["draft_quantization"]]
    assert {row["shape"] for row in steps} == {"plain", "chain:3", "chain:5", "tree:4,2,1"}
    for row in steps:
        shape, batch = TreeShape.parse(row["shape"].replace("plain", "none")), row["batch"]
        found = library.tables["h200-8b"].seconds(batch, batch * (1 + shape.nodes), shape.depth, batch * row["context"])
        assert 1000 * found == pytest.approx(row["step_milliseconds"], rel=0.12), row["shape"]


def test_wider_trees_cost_more_and_as_many_passes(library: Library) -> None:
    for table in library.tables.values():
        seconds = [table.seconds(4, 4 * (1 + nodes), 3, 800) for nodes in (6, 7, 9, 11, 16, 30)]
        assert seconds == sorted(seconds)
        for nodes in (5, 16):
            more = table.seconds(4, 4 * (1 + nodes), 3, 800) - table.seconds(4, 4 * (1 + nodes), 2, 800)
            assert more == pytest.approx(table.pass_seconds[2])


@pytest.mark.parametrize("device", ["h200-8b", "plain-engine-8b"])
def test_a_step_in_which_few_sequences_draft_takes_what_its_composition_says(
    library: Library, recordings: Path, device: str
) -> None:
    """Speculation costs its fixed part once it drafts anything."""
    known = json.loads((recordings / "steps-composed.json").read_text())["devices"][device]
    for drafting, depth in ((0, 0), (1, 3), (2, 5), (8, 3), (0, 4)):
        tokens, kv = 8 + drafting * depth, known["kv_token_seconds"] * 8 * 512
        kv *= 1 + known.get("kv_node_share", 0.0) * drafting * depth / 8
        networks = (known["weights_seconds"] ** 3 + (known["token_seconds"] * tokens) ** 3) ** (1 / 3)
        one_pass = known["pass_seconds"] + 8 * known["pass_sequence_seconds"]
        drafts = known["speculation_seconds"] + depth * one_pass if depth else 0.0
        found = library.tables[device].seconds(8, tokens, depth, 8 * 512)
        assert found == pytest.approx(known["overhead_seconds"] + networks + kv + drafts, rel=0.01)


def test_more_passes_than_the_shape_cost_more(library: Library) -> None:
    for table in library.tables.values():
        assert table.seconds(4, 4, 5, 800) > table.seconds(4, 4, 0, 800)


def test_noise_has_a_mean_of_one(library: Library) -> None:
    for table in library.tables.values():
        count = len(table.noise)
        means = [table.noisy(offset, 64)[0] for offset in range(count)]
        assert sum(means) / count == pytest.approx(1.0, abs=0.02)
        assert table.noisy(0, 64)[1] >= table.noisy(0, 64)[0] ** 2
