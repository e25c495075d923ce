"""Step costs: the sums equal those of least squares on FEATURES, and never decrease."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import FEATURES
from specdecode_worker.engine.stats import CLIP, StepCosts, StepSize

SIZES = st.builds(
    StepSize,
    sequences=st.integers(1, 64),
    verify_tokens=st.integers(0, 600),
    kv_tokens=st.integers(0, 10**5),
    draft_passes=st.integers(0, 2),
    prefill_tokens=st.sampled_from([0, 0, 17]),
)
STEPS = st.lists(st.tuples(SIZES, st.integers(1, 30), st.floats(0.001, 0.1), st.integers(0, 1)), max_size=25)


def size(**change: int) -> StepSize:
    fields = {"sequences": 2, "verify_tokens": 4, "kv_tokens": 30, "draft_passes": 1, "prefill_tokens": 0}
    return StepSize(**{**fields, **change})


def test_x_has_the_features_in_the_order_of_the_contract() -> None:
    step_size = StepSize(sequences=2, verify_tokens=3, kv_tokens=4, draft_passes=5, prefill_tokens=6)
    assert dict(zip(FEATURES, step_size.x, strict=True)) == {
        "one": 1,
        "sequences": 2,
        "verify_tokens": 3,
        "kv_tokens": 4,
        "draft_passes": 5,
        "prefill_tokens": 6,
    }


@pytest.mark.parametrize(("tokens", "edge"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)])
def test_the_tokens_bucket_is_the_next_power_of_two(tokens: int, edge: int) -> None:
    assert size(verify_tokens=tokens).cell_key(0)[0] == edge
    assert size(verify_tokens=0, prefill_tokens=tokens).cell_key(0)[0] == edge, "a prompt's tokens are packed as well"


@given(STEPS)
def test_sums_equal_those_of_least_squares(steps: list[tuple[StepSize, int, float, int]]) -> None:
    costs = StepCosts()
    for step, emitted, seconds, context in steps:
        costs.add(context, step, emitted, seconds)
    cells = costs.cells(1000)
    assert sum(cell.count for cell in cells) == len(steps)
    for cell in cells:
        kind = (cell.tokens_bucket, cell.draft_passes, cell.prefill, cell.context_bucket)
        mine = [(s.x, e, t) for s, e, t, c in steps if s.cell_key(c) == kind]
        k = range(len(FEATURES))
        if cell.clipped:
            continue
        assert cell.x == pytest.approx([sum(x[i] for x, _, _ in mine) for i in k])
        assert cell.xx == pytest.approx([sum(x[i] * x[j] for x, _, _ in mine) for i in k for j in k if j >= i])
        assert cell.xt == pytest.approx([sum(x[i] * t for x, _, t in mine) for i in k])
        assert (cell.t, cell.tt) == pytest.approx((sum(t for *_, t in mine), sum(t * t for *_, t in mine)))
        assert (cell.wall_seconds, cell.device_seconds) == pytest.approx((cell.t, cell.t))
        assert cell.emitted == sum(e for _, e, _ in mine)


def test_a_reading_is_exact_enough_to_subtract() -> None:
    """Sums stay precise enough to subtract.

    After 200 steps, the difference of two readings shows one more step to one part in a thousand.
    """
    costs = StepCosts()
    for _ in range(200):
        costs.add(0, size(kv_tokens=10**5), 1, 0.01)
    (cell,) = costs.cells(1)
    costs.add(0, size(kv_tokens=10**5), 1, 0.01)
    (after,) = costs.cells(1)
    kv = FEATURES.index("kv_tokens")
    assert after.x[kv] - cell.x[kv] == pytest.approx(1e5)
    assert after.xt[kv] - cell.xt[kv] == pytest.approx(1e3, rel=1e-3)


def test_many_steps_are_summed_as_few_are() -> None:
    costs, k, kv = StepCosts(), len(FEATURES), FEATURES.index("kv_tokens")
    upper = [(i, j) for i in range(k) for j in range(i, k)]
    for step in range(1, 201):
        costs.add(0, size(kv_tokens=step), 1, 0.01)
        assert costs.cells(1)[0].x[kv] == sum(range(step + 1))
    for step in range(201, 401):
        costs.add(0, size(kv_tokens=step), 1, 0.01)
    (cell,) = costs.cells(1)
    assert (cell.count, cell.x[0], cell.x[kv]) == (400, 400, 80200)
    assert cell.xx[upper.index((kv, kv))] == sum(step**2 for step in range(401))
    assert cell.xx[upper.index((1, kv))] == 2 * 80200
    assert cell.xt[kv] == pytest.approx(802)


def test_stall_is_clipped_and_reported() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.add(0, size(), 1, 0.01)
    costs.add(0, size(), 1, 5.0)
    (cell,) = costs.cells(1)
    assert cell.clipped == 1
    assert cell.t == pytest.approx(10 * 0.01 + CLIP * 0.01)
    assert cell.wall_seconds == pytest.approx(10 * 0.01 + 5.0), "wall seconds are never clipped"
    assert cell.xt[0] == pytest.approx(cell.t)


def test_clipping_ends_if_the_machine_stays_slower() -> None:
    costs = StepCosts()
    for seconds in [0.01] * 20 + [1.0] * 60:
        costs.add(0, size(), 1, seconds)
    (before,) = costs.cells(1)
    costs.add(0, size(), 1, 1.0)
    (after,) = costs.cells(1)
    assert after.clipped == before.clipped
    assert after.t - before.t == pytest.approx(1.0)
