"""The engine in this process, over a small random Llama: arrivals, aborts, ends, refusals and accounting."""

from __future__ import annotations

import time
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from specdecode_worker.contract import DraftState, Plan, Report, SyntheticKnobs, TreeShape
from specdecode_worker.core.device_state import DeviceState, HostCopy
from specdecode_worker.core.messages import Submit, Tokens
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.engine import engine as engine_module
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.target import LaunchedStep
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.target_states import TargetStates
from support.small_llama import VOCABULARY
from support.worker.accounts import check_engine
from support.worker.small_engine import drain, plan_of, small_engine, submit, texts

SHAPES = ["none", "chain:3", "tree:3,2,1"]


def plain_text(request: Submit) -> list[int]:
    engine = small_engine(draft=False)
    engine.add(request)
    return texts(drain(engine))[request.request_id]


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    """Return 60 tokens of the plain text of the prompt that most tests send."""
    return plain_text(submit(max_tokens=60))


@pytest.fixture(params=[False, True], ids=["direct", "pipelined"])
def pipelined(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_abort_in_mid_flight_frees_everything(shape: str, steps: int, pipelined: bool) -> None:
    engine = small_engine(max_num_seqs=2, pipelined=pipelined)
    engine.set_plan(plan_of(shape))
    for name in "abc":
        engine.add(submit(name, prompt=[1] * 40, max_tokens=50))
    for _ in range(steps):
        engine.step()
    for name in ("a", "b", "c", "nobody"):
        engine.abort(name)
        check_engine(engine)
    assert engine.report().kv_tokens_used == 0
    assert not any(new.tokens for new in drain(engine)), "nobody is told of an aborted request"
    report = engine.report()
    assert (report.running, report.waiting, engine.idle) == (0, 0, True)
    assert sum(cell.finished for cell in report.traffic) == 0


def test_a_draft_without_memory_for_its_states_changes_nothing(
    greedy: list[int], pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(pipelined=pipelined)
    engine.set_plan(plan_of("chain:3"))
    engine.add(submit(max_tokens=60))
    outputs = [new for _ in range(4) for new in engine.step()]
    drafter: Any = SimpleNamespace(reads=TargetStates(layers=(1,)), columns=None)

    def new_states(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as full:
        full.setattr(DeviceState, "new_states", new_states)
        with pytest.raises(ModelError, match="file:///large: there is too little memory"):
            engine.set_draft("", LoadedDraft(drafter, DraftState(hash="large", uri="file:///large")))
    outputs += drain(engine)
    assert texts(outputs)["r"] == greedy
    assert engine.report().draft.hash == "d"


def pass_deadlines(engine: Engine) -> None:
    """Let the time of all deadlines come."""
    engine._deadlines._heap = [(0.0, *entry[1:]) for entry in engine._deadlines._heap]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_deadline_cancels_waiting_and_running_requests(greedy: list[int], steps: int, pipelined: bool) -> None:
    """Requests are cancelled in the first step after their deadline; the others keep their text."""
    engine = small_engine(max_num_seqs=2, pipelined=pipelined)
    engine.set_plan(plan_of("chain:3"))
    in_one_second = time.monotonic() + 1
    engine.add(submit("stays", max_tokens=60))
    for name in ("runs", "waits"):
        engine.add(structs.replace(submit(name, prompt=[1] * 40, max_tokens=50), deadline_seconds=in_one_second))
    engine.add(structs.replace(submit("queues", max_tokens=5), queue_deadline_seconds=in_one_second))
    outputs = [new for _ in range(steps) for new in engine.step()]
    assert not any(new.finish for new in outputs)
    pass_deadlines(engine)
    outputs += engine.step()
    cancelled = {new.request_id: new.finish for new in outputs if new.finish}
    assert cancelled == {"runs": "deadline", "waits": "deadline", "queues": "queue_timeout"}
    check_engine(engine)
    assert len(engine._requests) == 1
    report = engine.report()
    assert (report.running, report.waiting) == (1, 0)
    after = drain(engine)
    assert {new.request_id for new in after} == {"stays"}
    outputs += after
    assert texts(outputs)["stays"] == greedy


def test_queue_deadline_does_not_concern_admitted_requests(pipelined: bool) -> None:
    engine = small_engine(pipelined=pipelined)
    engine.add(structs.replace(submit("runs", max_tokens=8), queue_deadline_seconds=time.monotonic() + 60))
    engine.step()
    pass_deadlines(engine)
    assert [new.finish for new in drain(engine) if new.finish] == ["length"]


@pytest.mark.parametrize(("prompt", "new"), [(100, 101), (200, 1), (201, 0), (0, 5), (5, 0)])
def test_a_request_that_cannot_fit_is_refused_with_a_reason(prompt: int, new: int) -> None:
    engine = small_engine(max_model_len=200)
    with pytest.raises(ValueError, match=rf"{prompt} prompt tokens and {new} new ones .* at most 200 together"):
        engine.add(submit(prompt=[1] * prompt, max_tokens=new))
    assert engine.idle, "a refusal leaves nothing behind"
    assert engine.report().traffic == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, VOCABULARY]},
        {"prompt": [-1]},
        {"logit_bias": ((VOCABULARY, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"stop_token_ids": (10**6,), "min_tokens": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_token_ids_beyond_the_embedding_are_refused(fields: dict[str, Any]) -> None:
    engine = small_engine()
    with pytest.raises(ValueError, match="token ids"):
        engine.add(submit(**fields))
    assert engine.idle
    engine.add(submit(logit_bias=((0, 1.0), (VOCABULARY - 1, 1.0))))


def test_a_small_cache_limits_request_length_and_every_accepted_request_finishes(pipelined: bool) -> None:
    """Four blocks hold 64 tokens, although the model could process more."""
    engine = small_engine(blocks=1 + 4, pipelined=pipelined)
    engine.set_plan(plan_of("chain:6"))
    assert engine.max_model_len == 64
    with pytest.raises(ValueError, match="at most 64 together"):
        engine.add(submit("big", prompt=[1] * 45, max_tokens=20))
    engine.add(submit("fits", prompt=[1] * 45, max_tokens=19))
    engine.add(submit("next", max_tokens=5))
    outputs = drain(engine, most=150)
    assert {name: len(text) for name, text in texts(outputs).items()} == {"fits": 19, "next": 5}


def test_a_large_tree_has_room_behind_the_longest_text(pipelined: bool) -> None:
    """A tree of 62 nodes is launched behind a step in flight that may commit six tokens of the last four."""
    request = submit(prompt=[1 + token % 7 for token in range(188)], max_tokens=4)
    engine = small_engine(max_model_len=192, budget=256, pipelined=pipelined)
    engine.set_plan(plan_of("tree:2,2,2,2,2"))
    engine.add(request)
    assert texts(drain(engine))["r"] == plain_text(request)


def end_of(engine: Engine, request: Submit) -> tuple[list[int], str | None]:
    engine.add(request)
    outputs = drain(engine)
    assert [new.finish for new in outputs[:-1]] == [None] * (len(outputs) - 1)
    return texts(outputs)[request.request_id], outputs[-1].finish


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at", [0, 1, 7, 20])
def test_a_stop_token_ends_the_text_at_any_position_of_a_step(
    greedy: list[int], shape: str, at: int, pipelined: bool
) -> None:
    token = greedy[at]
    first = greedy.index(token)
    for stops, ids in ({"stop_token_ids": (token,)}, ()), ({}, (token,)):
        engine = small_engine(eos=ids, pipelined=pipelined)
        engine.set_plan(plan_of(shape))
        text, finish = end_of(engine, submit(max_tokens=60, **stops))
        assert (text, finish) == (greedy[: first + 1], "stop")


@pytest.mark.parametrize("length", [1, 3, 12])
@pytest.mark.parametrize("shape", ["chain:6", "tree:3,2,1"])
def test_pipelined_steps_propose_the_same_drafts(shape: str, length: int) -> None:
    """The draft sees the results of a step in flight that the host does not know yet."""
    readings = []
    for pipelined in (False, True):
        engine = small_engine(pipelined=pipelined)
        engine.set_plan(plan_of(shape))
        end_of(engine, submit(prompt=range(1, 1 + length), max_tokens=90))
        report = engine.report()
        readings.append((report.drafts, report.accepted_tokens))
    assert readings[0] == readings[1]


def run(shapes: list[str], requests: int = 6, **fields: object) -> tuple[Engine, list[Tokens]]:
    engine = small_engine()
    engine.set_plan(plan_of(*shapes, **fields))
    for i in range(requests):
        task = f"t{i % len(shapes)}" if i % len(shapes) else "other"
        engine.add(submit(str(i), prompt=range(1, 8 + i), max_tokens=30 + i, seed=i, temperature=i % 2, task=task))
    return engine, drain(engine)


@pytest.mark.parametrize("shapes", [["none"], ["chain:3"], ["tree:3,2,1"], ["chain:4", "none", "tree:2,2"]])
def test_emitted_tokens_equal_steps_plus_accepted_tokens(shapes: list[str]) -> None:
    """The first token comes from the prompt. Tokens of the last step beyond max_tokens are accepted and dropped."""
    engine, outputs = run(shapes)
    report = engine.report()
    emitted = sum(len(new.tokens) for new in outputs)
    dropped = 0
    for name in texts(outputs):
        mine = [new for new in outputs if new.request_id == name]
        assert (mine[0].accepted, len(mine[0].tokens)) == (0, 1)
        for before, after in pairwise(mine):
            came = 1 + after.accepted - before.accepted
            assert len(after.tokens) == came or after.finish
            dropped += came - len(after.tokens)
    assert emitted == sum(30 + i for i in range(6))
    assert emitted + dropped == len(texts(outputs)) + report.plain_steps + report.drafts + report.accepted_tokens
    assert (report.accepted_tokens > 0) == (report.drafts > 0) == (shapes != ["none"])


def test_the_report_is_the_sum_of_the_tokens_sent_to_requests() -> None:
    shapes = ["chain:4", "none", "tree:2,2"]
    engine, outputs = run(shapes)
    report = engine.report()
    last = {new.request_id: new for new in outputs}
    assert report.drafts == sum(new.drafts for new in last.values())
    assert report.draft_tokens == sum(new.draft_tokens for new in last.values())
    assert report.accepted_tokens == sum(new.accepted for new in last.values())
    for task, name in ("other", "03"), ("t1", "14"), ("t2", "25"):
        nodes = TreeShape.parse(shapes[int(name[0])]).nodes
        cells = [cell for cell in report.requests if cell.task == task]
        assert sum(cell.a for cell in cells) == sum(last[one].accepted for one in name)
        assert sum(cell.aa for cell in cells) == sum(last[one].accepted ** 2 for one in name)
        assert sum(cell.d for cell in cells) * nodes == sum(last[one].draft_tokens for one in name)
        (by_task,) = (cell for cell in report.tasks if cell.task == task)
        assert by_task.drafts == sum(last[one].drafts for one in name)
        assert by_task.draft_tokens == sum(last[one].draft_tokens for one in name)
        assert by_task.accepted_tokens == sum(last[one].accepted for one in name)
        (traffic,) = (cell for cell in report.traffic if cell.task == task)
        assert (traffic.arrivals, traffic.finished) == (2, 2)
        assert traffic.prompt_tokens == sum(7 + int(one) for one in name)
        assert traffic.output_tokens == sum(30 + int(one) for one in name)


def test_acceptance_cells_agree_with_accepted_tokens() -> None:
    """Along a chain a hit at depth d is an accepted token of depth d, and leads to the next depth."""
    engine, _ = run(["chain:3"])
    report = engine.report()
    total = {d: sum(c.total for c in report.acceptance if c.depth == d) for d in (1, 2, 3)}
    hits = {d: sum(c.ranks[0] for c in report.acceptance if c.depth == d) for d in (1, 2, 3)}
    assert {cell.parent for cell in report.acceptance} == {"main"}
    assert {cell.sampled for cell in report.acceptance} == {False, True}
    assert total[1] == report.drafts
    # The last step of each request counts only up to the last token that was kept.
    assert 0 <= hits[1] - total[2] <= 6
    assert 0 <= hits[2] - total[3] <= 6
    assert 0 <= report.accepted_tokens - sum(hits.values()) <= 6 * 3


def test_step_cells_count_every_step_and_token() -> None:
    engine, outputs = run(["chain:3"], requests=3)
    cells = engine.report().steps
    first = sum(cell.emitted for cell in cells if cell.prefill)
    output_tokens = sum(len(new.tokens) for new in outputs)
    assert output_tokens <= sum(cell.emitted for cell in cells) <= output_tokens + 3 * 3
    assert first == 3
    sums = [sum(cell.x[i] for cell in cells) for i in range(6)]
    report = engine.report()
    assert sums[0] == sum(cell.count for cell in cells)
    assert sums[1] == 3 + report.drafts
    assert sums[2] == report.drafts + report.draft_tokens
    assert sums[5] == 7 + 8 + 9
    assert {cell.draft_passes for cell in cells if not cell.prefill} == {3}


def flat(report: Report) -> dict[str, float]:
    """Return every counter of a report under a unique name."""
    counters = {
        name: float(getattr(report, name))
        for name in (
            *("clock_seconds", "running_request_seconds", "waiting_request_seconds"),
            *("drafts", "draft_tokens", "accepted_tokens", "plain_steps"),
        )
    }
    for cell in report.acceptance:
        counters |= {f"{cell.task} {cell.sampled} {cell.depth} {cell.parent} {r}": n for r, n in enumerate(cell.ranks)}
    for sums in report.requests:
        counters |= {f"{sums.task} {sums.sampled} {k}": getattr(sums, k) for k in ("n", "a", "d", "aa", "ad", "dd")}
    for traffic in report.traffic:
        counters |= {f"{traffic.task} {k}": v for k, v in traffic.model_dump(exclude={"task"}).items()}
    for histogram in report.latency:
        counters |= {f"{histogram.name} {i}": n for i, n in enumerate((*histogram.counts, histogram.sum))}
    for step in report.steps:
        totals = (step.count, step.t, step.tt, step.wall_seconds, step.device_seconds, step.clipped, step.emitted)
        kind = (step.tokens_bucket, step.draft_passes, step.prefill, step.context_bucket)
        counters |= {f"{kind} {i}": v for i, v in enumerate((*totals, *step.x, *step.xx, *step.xt))}
    return counters


@pytest.mark.usefixtures("ticking")
def test_counters_only_rise_through_aborts_preemptions_and_new_plans() -> None:
    engine = small_engine(blocks=13, budget=24)
    readings = [flat(engine.report())]
    for turn, shape in enumerate(("chain:3", "none", "tree:3,2,1", "chain:1")):
        engine.set_plan(plan_of(shape, version=turn + 1, explore=0.5, max_depth=5))
        for i in range(4):
            engine.add(submit(f"{turn}{i}", prompt=range(1, 25), max_tokens=40, seed=i, temperature=i % 2))
        for _ in range(8):
            engine.step()
            readings.append(flat(engine.report()))
        engine.abort(f"{turn}1")
    drain(engine)
    readings.append(flat(engine.report()))
    for before, after in pairwise(readings):
        assert before.keys() <= after.keys(), "no cell is lost"
        fell = {name: (value, after[name]) for name, value in before.items() if after[name] < value}
        assert not fell
    assert engine.report().preemptions > 0


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a clock that advances by a millisecond per reading, so that the exploration budget is deterministic."""
    ticks = count(10_000)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 1000))


@pytest.mark.usefixtures("ticking")
def test_shadow_drafts_measure_depths_that_are_not_verified() -> None:
    """The plan runs chains of one; the deeper nodes of the shadow drafts are scored and not verified."""
    engine = small_engine()
    engine.set_plan(plan_of("chain:1", explore=0.5, max_depth=5))
    for i in range(12):  # enough requests, because the number of shadow steps depends on their duration
        engine.add(submit(str(i), prompt=range(1, 8 + i), max_tokens=22))
    drain(engine)
    shadowed = engine.report()
    assert shadowed.draft_tokens == shadowed.drafts, "one node a draft was verified"
    by_depth = {cell.depth: cell for cell in shadowed.acceptance}
    assert set(by_depth) == {1, 2, 3, 4, 5}
    assert all(by_depth[d].total <= by_depth[d - 1].ranks[0] for d in (3, 4, 5)), "reached only through hits"


def test_synthetic_acceptance_shortens_paths_and_keeps_the_text(greedy: list[int]) -> None:
    engine = small_engine()
    engine.set_plan(plan_of("chain:4"))
    engine.set_synthetic(SyntheticKnobs(acceptance=(1.0, 0.0)))
    assert end_of(engine, submit(max_tokens=60)) == (greedy, "length")
    report = engine.report()
    assert 0 < report.accepted_tokens <= report.drafts, "no path is longer than one node"
    assert sum(cell.ranks[0] for cell in report.acceptance if cell.depth >= 2) == 0
    assert report.synthetic == SyntheticKnobs(acceptance=(1.0, 0.0))


def test_without_a_draft_a_plan_with_trees_runs_plain_steps(greedy: list[int]) -> None:
    engine = small_engine(draft=False)
    engine.set_plan(Plan(version=1, initial=TreeShape.chain(4), max_depth=4))
    assert end_of(engine, submit(max_tokens=60)) == (greedy, "length")
    assert (engine.report().drafts, engine.report().plain_steps) == (0, 59)


def test_a_step_whose_requests_had_ended_tells_no_time_per_token() -> None:
    """It was launched before the only token of its request was read."""
    engine = small_engine(pipelined=True)
    engine.set_plan(plan_of("chain:3", guard=True))
    engine.set_plain_step_time(1, 0.001)
    for name in "abcdef":
        engine.add(submit(name, max_tokens=1))
        assert texts(drain(engine)).keys() == {name}
    report = engine.report()
    assert sum(cell.count for cell in report.steps if not cell.prefill) == 6
    assert [cell.speculative for cell in report.guard] == [None]


def test_steps_in_flight_end_before_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a rank that ends within a step leaves the first one in a collective that never returns."""
    engine = small_engine(pipelined=True)
    engine.set_plan(plan_of("chain:3"))
    engine.add(submit(max_tokens=60))
    engine.step()
    assert len(engine._launched) == 1
    ends: list[str] = []
    monkeypatch.setattr(LaunchedStep, "read", lambda step: ends.append("step"))
    monkeypatch.setattr(engine._target, "close", lambda: ends.append("ranks"))
    engine.close()
    assert ends == ["step", "ranks"]


def test_a_step_of_chunks_alone_takes_the_time_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no result to wait for. The host would queue one behind the other, each in the time of a launch."""
    waits = count()

    def synchronize() -> None:
        next(waits)
        time.sleep(0.02)

    event: Any = SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(HostCopy, "after_queued", lambda device: HostCopy(event))
    engine = small_engine(pipelined=True, budget=16)
    engine.add(submit(prompt=range(1, 41), max_tokens=1))
    drain(engine)
    [chunks] = [cell for cell in engine.report().steps if cell.tokens_bucket == 16]
    assert (chunks.count, chunks.emitted) == (2, 0)
    assert chunks.wall_seconds >= 2 * 0.02
    assert next(waits) >= 2
