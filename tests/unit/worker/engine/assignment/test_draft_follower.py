"""Follower of the plan's assignment, on a small engine that runs its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_worker.contract import (
    Artifact,
    DraftAssignment,
    DraftConfig,
    DraftState,
    DraftTrial,
    Env,
    ModelConfig,
    Plan,
    TaskMatch,
    WorkerConfig,
    candidate_first,
)
from specdecode_worker.core.messages import SetDraft
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.registry import paged_cache
from specdecode_worker.drafts.swap import FIRST_RETRY_SECONDS, DraftFollower, DraftSwapQueue, start_draft
from specdecode_worker.models.errors import ModelError
from support.worker.small_engine import CPU, drain, networks, plan_of, small_engine, submit, texts

SPEC, TARGET = "file:///spec", "file:///target"
CONFIG = WorkerConfig(model=ModelConfig(uri=TARGET, served_name="m"), draft=DraftConfig(method="eagle3", uri=SPEC))


def artifact(name: str) -> Artifact:
    return Artifact(uri=f"file:///{name}", hash=name)


def trial(candidate: str = "new", **fields: Any) -> DraftTrial:
    return DraftTrial(**{"id": "t", "candidate": artifact(candidate), "pod": "me", "block_requests": 2, **fields})


class Harness:
    """Engine with a follower, driven as the engine loop drives it. A draft called ``bad...`` cannot be loaded."""

    def __init__(self) -> None:
        self.engine = small_engine()
        self.now = 100.0
        self.loads: list[str] = []
        self.installed: list[str] = []
        self.emitted: list[Any] = []
        self.version = 0
        self.swaps = DraftSwapQueue(self._load)
        self.follower = DraftFollower(
            self.engine, self.swaps, self._install, CONFIG, self.engine.set_plan, clock=lambda: self.now
        )
        self.engine._drafts._drafts[""] = self._draft("d", SPEC)

    def _draft(self, draft_hash: str, uri: str) -> LoadedDraft:
        target, head = networks().target, networks().head
        scheduler = self.engine._scheduler
        cache = paged_cache(target.config, 2, scheduler.blocks, target.model.embed_tokens.weight.dtype, CPU)
        drafter = EagleDrafter(head, None, cache, self.engine._state, 512)  # type: ignore[arg-type]
        return LoadedDraft(drafter, DraftState(method="eagle3", hash=draft_hash, uri=uri))

    def _load(self, config: DraftConfig, name: str = "") -> LoadedDraft:
        uri = config.uri or ""
        self.loads.append(uri)
        if "bad" in uri:
            raise ModelError(f"{uri}: fc.weight is missing")
        draft_hash = "d" if uri == SPEC else uri.removeprefix("file:///")
        return self._draft(draft_hash, uri)

    def _install(self, loaded: LoadedDraft) -> None:
        self.installed.append(loaded.state.hash)
        self.emitted += self.engine.set_draft("", loaded)

    @property
    def hash(self) -> str:
        return self.engine.draft.hash

    @property
    def problem(self) -> str:
        status = self.swaps.status().get("")
        return (status and status.problem) or ""

    def plan(self, stable: str | None = None, trial: DraftTrial | None = None, **fields: Any) -> Plan:
        self.version += 1
        assignment = DraftAssignment(
            spec_draft=SPEC, target=TARGET, stable=None if stable is None else artifact(stable), trial=trial
        )
        return plan_of("chain:2", **{"version": self.version, "assignment": assignment, **fields})

    def push(self, *args: Any, **fields: Any) -> Plan:
        plan = self.plan(*args, **fields)
        self.follower.take_plan(plan)
        self.settle()
        return plan

    def ask_for(self, name: str) -> None:
        """Do what the loop does with a PUT /v1/draft."""
        config = DraftConfig(method="eagle3", uri=f"file:///{name}")
        self.swaps.begin(SetDraft(1, config.model_dump_json().encode()))
        self.follower.give_way()

    def turn(self) -> None:
        """Run one turn of the engine loop."""
        for swap in self.swaps.finished():
            self.follower.take_swap(swap)
        self.follower.advance()
        if not self.engine.idle:
            self.emitted += self.engine.step()

    def settle(self) -> None:
        """Run turns until no draft is loading and nothing is due."""
        deadline = time.monotonic() + 20
        for _ in range(3):
            self.turn()
            while self.swaps.pending:
                assert time.monotonic() < deadline
                self.turn()

    def turn_until(self, condition: Callable[[], object]) -> None:
        """Run turns until a condition holds."""
        for _ in range(500):
            if condition():
                return
            self.turn()
        raise AssertionError("the condition does not come true")

    def serve(self, *names: str, task: str = "other") -> None:
        """Serve requests one after the other, to their ends."""
        for name in names:
            self.engine.add(submit(name, (1, 2, len(name)), task=task))
            while not self.engine.idle:
                self.turn()
            self.turn()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setenv(Env.pod_name, "me")
    return Harness()


def test_the_assigned_draft_is_loaded_and_the_draft_of_the_config_comes_back(run: Harness) -> None:
    run.push("new")
    assert (run.hash, run.loads) == ("new", ["file:///new"])
    run.push("new")
    assert run.loads == ["file:///new"], "it runs already"
    run.push(None)
    assert run.hash == "d"
    run.push("new")
    run.push(assignment=None)
    assert run.hash == "d", "without an assignment each worker runs the draft of its config"


@pytest.mark.parametrize("own", [{"spec_draft": "file:///mine"}, {"target": "file:///mine"}])
def test_an_assignment_for_another_spec_is_ignored(run: Harness, own: dict[str, str]) -> None:
    fields = {"spec_draft": SPEC, "target": TARGET, "stable": artifact("new"), "trial": trial(), **own}
    run.push(assignment=DraftAssignment.model_validate(fields))
    assert (run.hash, run.loads, run.follower.trial) == ("d", [], None)


def test_a_draft_of_a_person_stays_until_the_next_plan_with_an_assignment(run: Harness) -> None:
    run.push("new")
    run.ask_for("mine")
    run.settle()
    run.now += 1e6
    run.settle()
    assert run.hash == "mine"
    run.push("new")
    assert run.hash == "new"
    run.ask_for("mine")
    run.push("new")
    assert (run.hash, run.swaps.pending) == ("new", False), "one that is still loading is discarded"


def test_a_draft_of_a_person_stays_under_plans_without_assignments(run: Harness) -> None:
    run.ask_for("mine")
    run.settle()
    run.push(assignment=None)
    assert run.hash == "mine"


def test_failures_are_reported_and_tried_again_with_a_back_off(run: Harness) -> None:
    run.push("bad")
    assert (run.hash, "fc.weight is missing" in run.problem) == ("d", True)
    for wait in (FIRST_RETRY_SECONDS, 2 * FIRST_RETRY_SECONDS, 4 * FIRST_RETRY_SECONDS):
        before = len(run.loads)
        run.now += 0.9 * wait
        run.push("bad")
        assert len(run.loads) == before, "the same plan again does not shorten the wait"
        run.now += 0.1 * wait
        run.settle()
        assert len(run.loads) == before + 1
    run.push("new")
    assert (run.hash, run.problem) == ("new", "")


def test_another_hash_is_refused(run: Harness) -> None:
    assignment = DraftAssignment(spec_draft=SPEC, target=TARGET, stable=Artifact(uri="file:///new", hash="other"))
    run.push(assignment=assignment)
    assert run.hash == "d"
    assert "has the hash new and not other" in run.problem


@pytest.mark.slow
def test_a_trial_runs_pairs_in_the_order_of_the_coin_and_texts_stay_the_same(run: Harness) -> None:
    names = [f"r{index:0{index % 5 + 1}}" for index in range(20)]
    plain = small_engine(draft=False)
    expected: dict[str, list[int]] = {}
    for name in names:
        plain.add(submit(name, (1, 2, len(name))))
        expected |= texts(drain(plain))
    run.push(None, trial())
    run.serve(*names)
    state = run.follower.trial
    assert (state.state, state.pair, [pair.index for pair in state.pairs]) == ("Running", 5, [0, 1, 2, 3, 4])
    order = [hash_ for pair in range(6) for hash_ in (("new", "d") if candidate_first("t", pair) else ("d", "new"))]
    assert run.installed == order[:11], "every block begins with a swap"
    assert {"new", "d"} == {cell.draft for cell in run.engine.report().acceptance}
    assert texts(run.emitted) == expected
    assert all(
        cost.tokens and cost.sequence_seconds for pair in state.pairs for cost in (*pair.incumbent, *pair.candidate)
    )
    tokens = sum(cost.tokens for pair in state.pairs for cost in (*pair.incumbent, *pair.candidate))
    assert tokens == sum(len(text) - 1 for text in expected.values()), "all but the token of the prompt's last chunk"


def test_requests_that_run_at_a_swap_belong_to_no_block(run: Harness) -> None:
    run.push(None, trial(block_requests=1))
    run.engine.add(submit("long", max_tokens=150))
    run.engine.add(submit("short", max_tokens=3))
    run.turn_until(lambda: len(run.installed) == 2)
    run.engine.add(submit("next", max_tokens=6))
    run.turn_until(lambda: run.follower.trial is not None and run.follower.trial.pairs)
    assert run.engine._requests.keys() == {"long"}
    (pair,) = run.follower.trial.pairs
    second = pair.incumbent if candidate_first("t", 0) else pair.candidate
    assert sum(cost.tokens for cost in second) == 5


def test_both_drafts_run_the_rows_of_the_plan_and_nothing_is_explored(run: Harness) -> None:
    run.push(None, trial(block_requests=1), explore=0.5, max_depth=4, guard=True)
    assert run.engine.report().plan.matches_draft
    run.engine._shape_selector._exploration.counted_seconds = 1e6  # any burst or shadow pass is affordable
    run.serve(*(f"r{index}" for index in range(6)))
    report = run.engine.report(trial=run.follower.trial)
    assert report.plan.matches_draft
    assert {cell.depth for cell in report.acceptance} == {1, 2}, "shadow passes would rank deeper tokens"
    assert {cell.draft_passes for cell in report.steps if not cell.prefill} <= {0, 2}
    run.push(None, None, explore=0.5, max_depth=4)
    run.push("new", None, explore=0.5, max_depth=4)
    assert not run.engine.report().plan.matches_draft, "the rows are for another draft"


def test_a_plan_waits_for_the_end_of_the_pair(run: Harness) -> None:
    first = run.push(None, trial())
    run.serve("a")
    second = run.push(None, trial(block_requests=1))
    run.serve("b", "c")
    assert run.engine.report().plan.version == first.version
    run.serve("d")
    assert run.engine.report().plan.version == second.version
    assert [pair.index for pair in run.follower.trial.pairs] == [0]
    run.serve("e", "f")
    assert [pair.index for pair in run.follower.trial.pairs] == [0, 1], "the new size of a block counts too"


@pytest.mark.parametrize("end", ["none", "elsewhere", "promoted", "another", "ignored"])
def test_a_plan_that_ends_the_trial_is_taken_at_once(run: Harness, end: str) -> None:
    run.push("old", trial())
    held = run.push("old", trial())
    while run.hash != "new":
        run.serve("a")
    run.engine.add(submit("running", max_tokens=100))
    run.turn()
    if end == "another":
        plan = run.push("old", trial("newer", id="u"))
    elif end == "ignored":
        fields = {"spec_draft": "file:///mine", "target": TARGET, "stable": artifact("x"), "trial": None}
        plan = run.push(assignment=DraftAssignment.model_validate(fields))
    else:
        plan = run.push("new" if end == "promoted" else "old", trial(pod="you") if end == "elsewhere" else None)
    assert run.engine.report().plan.version == plan.version > held.version
    stable = {"promoted": "new", "ignored": "d"}.get(end, "old")
    loads = len(run.loads)
    if end == "another":
        assert (run.follower.trial.id, run.follower.trial.state) == ("u", "Running")
        run.push("old", None)
    assert (run.hash, run.follower.trial, len(run.loads)) == (stable, None, loads)
    assert run.engine._recorder.block is None
    drain(run.engine)


def test_a_candidate_without_a_hash_is_tried_and_its_hash_is_reported(run: Harness) -> None:
    unknown = Artifact(uri="file:///new", hash="")
    run.push(None, DraftTrial(id="t", candidate=unknown, pod="me", block_requests=2))
    state = run.follower.trial
    assert (state.state, state.hash) == ("Running", "new")
    run.push(None, trial(id="t-2"))
    state = run.follower.trial
    assert (state.id, state.state, state.hash) == ("t-2", "Running", "new"), "the trial of the known hash begins anew"


def test_a_candidate_that_cannot_be_loaded_fails_the_trial(run: Harness) -> None:
    run.push("old", trial("bad-candidate"))
    state = run.follower.trial
    assert (state.state, "fc.weight is missing" in (state.problem or "")) == ("Failed", True)
    assert (run.hash, "fc.weight" in run.problem) == ("old", True)
    plan = run.push("old", trial("bad-candidate"))
    assert run.engine.report().plan.version == plan.version
    assert run.loads.count("file:///bad-candidate") == 1, "a failed trial is not tried again"
    run.push("old", trial("new", id="u"))
    assert run.follower.trial.state == "Running"


def test_an_incumbent_that_cannot_be_loaded_fails_the_trial(run: Harness) -> None:
    run.push("bad", trial())
    state = run.follower.trial
    assert (state.state, "the incumbent cannot be loaded" in (state.problem or "")) == ("Failed", True)
    assert run.hash == "d"


def test_a_swap_that_fails_between_blocks_fails_the_trial(run: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    run.push(None, trial(block_requests=1))
    run.serve("a")
    set_draft = run.engine.set_draft

    def refuse_the_candidate(name: str, loaded: LoadedDraft) -> Any:
        if loaded.state.hash == "new":
            raise ModelError("too little memory for the states")
        return set_draft(name, loaded)

    monkeypatch.setattr(run.engine, "set_draft", refuse_the_candidate)
    run.serve("b", "c", "d")
    state = run.follower.trial
    assert (state.state, state.problem, run.hash) == ("Failed", "too little memory for the states", "d")


def test_a_draft_of_a_person_ends_the_trial(run: Harness) -> None:
    run.push(None, trial())
    run.serve("a")
    run.ask_for("mine")
    assert run.hash == "d", "the incumbent runs until the draft is there"
    run.settle()
    state = run.follower.trial
    assert (run.hash, state.state, "PUT /v1/draft" in (state.problem or "")) == ("mine", "Failed", True)
    run.push(None, trial())
    assert run.hash == "d", "the next plan with an assignment wins"


def test_a_trial_that_ends_while_its_candidate_loads_leaves_nothing_behind(run: Harness) -> None:
    run.follower.take_plan(run.plan(None, trial()))
    run.follower.advance()
    assert run.swaps.pending
    run.follower.take_plan(run.plan(None, None))
    assert not run.swaps.pending
    run.settle()
    assert (run.hash, run.installed, run.follower.trial) == ("d", [], None)


def test_the_guard_knows_the_same_of_both_drafts_at_the_start_of_a_block(run: Harness) -> None:
    run.engine.set_plain_step_time(1, 0.5)
    run.push(None, trial(block_requests=1), guard=True)
    run.serve("a", "b", "c")
    guard = run.engine._shape_selector._guard
    assert guard._states == {}, "every block begins without evidence on shapes"
    plain = guard._plain[0, 0].seconds
    assert plain is not None, "plain times do not depend on the draft"


def test_a_start_with_the_wrong_files_falls_back_to_the_draft_of_the_config(run: Harness, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plan = run.plan("new")

    def missing(uri: str) -> Path:
        raise ModelError(f"{uri} is not there")

    assert start_draft(CONFIG, None, missing) == (CONFIG, "")
    assert start_draft(CONFIG, run.plan(None), missing) == (CONFIG, "")
    assert start_draft(CONFIG, plan, missing) == (CONFIG, "file:///new is not there")
    started, problem = start_draft(CONFIG, plan, lambda uri: tmp_path)
    assert started == CONFIG
    assert problem.startswith("file:///new has the hash ")
    run.engine.set_plan(plan)
    run.follower.start(plan, problem)
    run.settle()
    assert (run.hash, run.problem, run.loads) == ("d", problem, [])
    run.now += FIRST_RETRY_SECONDS
    run.settle()
    assert (run.hash, run.problem) == ("new", "")


def test_a_start_without_any_draft_loads_the_draft_of_the_config_first(run: Harness) -> None:
    run.engine._drafts._drafts.clear()
    plan = run.plan("bad")
    run.engine.set_plan(plan)
    run.follower.start(plan, "")
    run.settle()
    assert (run.hash, run.loads) == ("d", [SPEC])
    assert run.problem.startswith("the draft of the spec runs: ")


def test_tasks_with_a_draft_of_their_own_and_continued_requests(run: Harness) -> None:
    """A task with a draft of its own says nothing about the candidate. A request from another worker begins here."""
    run.engine.set_draft("own", run._draft("named", "file:///named"))
    tasks = (TaskMatch(name="t1", draft="own"), TaskMatch(name="t2"))
    run.push(None, trial(block_requests=3), tasks=tasks)
    run.serve("a", task="t1")
    block = run.engine._recorder.block
    assert (block.cells, block.is_complete) == ({}, False)
    continued = submit("b", task="t2")
    run.engine.add(msgspec.structs.replace(continued, emitted=(4, 5)))
    drain(run.engine)
    assert {cell.task for cell in block.cells} == {"t2"}
