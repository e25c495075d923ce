"""Stage merge: choose which of the drafts that a task declares in ``merge`` take part. Pure.

The plan and the replicas are then chosen for the drafts that take part, as if the spec declared no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.api.v1alpha1 import SpeculationSpec, TaskSpec
from specdecode_operator.decision import history
from specdecode_operator.decision.plan_stage import read_pin_state
from specdecode_operator.decision.size_stage import kv_tokens
from specdecode_operator.merging import choice, credit
from specdecode_operator.merging.choice import Option, Step, options_of
from specdecode_operator.merging.subsets import Credit, Names, TaskDrafts, subsets_of
from specdecode_operator.planning import loads, plan_rows, task_bounds, workload
from specdecode_operator.planning.acceptance_model import AcceptanceModel
from specdecode_operator.planning.decision_rule import LoadDecision
from specdecode_operator.planning.shape_search import ShapeSearch
from specdecode_operator.planning.step_time_model import StepTimeModel
from specdecode_operator.planning.tuning import TUNING as PLANNING
from specdecode_operator.state.learned import LearnedState, MergeChoice
from specdecode_operator.telemetry.counters import Delta
from specdecode_operator.times import iso
from specdecode_operator.types import Deployment, Observation
from specdecode_worker.contract import DRAFT_FREE, Buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of the stage."""

    learned: LearnedState
    deployment: Deployment
    """The deployment, whose tasks merge the drafts that take part and no others."""
    changes: tuple[DecisionRecord, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """One sentence for each task that declares merged drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Inputs that all tasks share."""

    deployment: Deployment
    observed: Observation
    delta: Delta | None
    buckets: Buckets
    now: float

    @property
    def speculation(self) -> SpeculationSpec:
        return self.deployment.spec.speculation


def choose_merges(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    delta: Delta | None,
    buckets: Buckets,
    *,
    now: float,
) -> Merged:
    """Choose the drafts of every task that merges some. Nothing changes for a deployment without such a task.

    Args:
        deployment: The deployment.
        observed: Workers with their reports.
        learned: State after the stages learn and drift.
        delta: Difference of all workers. None if no worker has a new reading.
        buckets: Buckets of concurrency and context that plan rows use.
        now: Operator's clock, in seconds since the epoch.
    """
    tasks = [task for task in deployment.spec.speculation.tasks if task.merge]
    if not tasks:
        is_empty = not (learned.credit or learned.merges)
        emptied = learned if is_empty else learned.model_copy(update={"credit": (), "merges": ()})
        return Merged(learned=emptied, deployment=deployment)
    stage = _Stage(deployment=deployment, observed=observed, delta=delta, buckets=buckets, now=now)
    learned = credit.learn_credit(learned, delta, [task.name for task in tasks], now)
    changes, sentences = list[DecisionRecord](), dict[str, str]()
    for task in tasks:
        learned, change, sentences[task.name] = _decide(stage, learned, task)
        changes += [change] if change else []
    names = {task.name for task in tasks}
    stored = tuple(one for one in learned.merges if one.task in names)
    learned = learned if stored == learned.merges else learned.model_copy(update={"merges": stored})
    return Merged(
        learned=learned, deployment=_with_merges(deployment, learned), changes=tuple(changes), texts=sentences
    )


# --- one task -----------------------------------------------------------------------------------------------------


def _decide(stage: _Stage, learned: LearnedState, task: TaskSpec) -> tuple[LearnedState, DecisionRecord | None, str]:
    """Return the state with the task's next choice, the record of a change, and the sentence about the task."""
    drafts, declared = _drafts_of(stage, learned, task), tuple(one.draft for one in task.merge)
    hashes = (drafts.own_hash, *(drafts.hashes[name] for name in declared))
    mode, known = _mode(stage.speculation, task), _known(learned, task.name)
    if mode in ("Off", "Static", "Advisory"):
        return _as_declared(stage, learned, drafts, choice.all_declared(task.name, declared, hashes), mode)
    if stage.deployment.spec.paused and known is not None:
        step = Step(known)
    else:
        step = choice.renewed(known, task.name, declared, hashes)
    running = Credit.of(learned, drafts, step.choice.drafts)
    if step.because is None and not _is_held(stage, learned, task.name):
        rule = _rule(stage, learned, task.name)
        step = choice.next_step(step.choice, _options(stage, learned, running, rule), rule, stage.now)
    if step.because is None:
        return _stored(learned, step.choice), None, choice.task_text(step.choice, running)
    before = known.drafts if known else declared
    is_news = step.because != "bounds" or set(before) != set(step.choice.drafts)
    was_trial = known is not None and known.before is not None
    record = _record(stage, learned, choice.merge_text(before, is_trial=was_trial), step) if is_news else None
    if step.reason:
        learned = running.with_counts(learned, step.choice.drafts)
    learned = _stored(credit.carried(learned, task.name, stage.now), step.choice)
    return learned, record, choice.task_text(step.choice, Credit.of(learned, drafts, step.choice.drafts))


def _as_declared(
    stage: _Stage, learned: LearnedState, drafts: TaskDrafts, whole: MergeChoice, mode: str
) -> tuple[LearnedState, None, str]:
    """Return the sentence about a task that merges the drafts that the spec declares, whatever was measured."""
    known, running = _known(learned, drafts.task), Credit.of(learned, drafts, whole.drafts)
    if known is not None:
        is_same = set(known.drafts) == set(whole.drafts)
        others = tuple(one for one in learned.merges if one.task != drafts.task)
        learned = learned if is_same else credit.carried(learned, drafts.task, stage.now)
        learned = learned.model_copy(update={"merges": others})
    text = choice.task_text(whole, running)
    rule = _rule(stage, learned, drafts.task) if mode == "Advisory" else None
    options = _options(stage, learned, running, rule)
    if options:
        step = choice.next_step(whole, options, rule, stage.now)
        text += f"; mode Auto would merge {choice.listed(step.choice.drafts)}" if step.because else ""
        text += f": {step.choice.reason}" if step.choice.reason else ""
    return learned, None, text


def _options(stage: _Stage, learned: LearnedState, running: Credit, rule: LoadDecision | None) -> list[Option]:
    """Return the subsets of the running drafts; none while too little is known of them, and without traffic."""
    if rule is None or not running.is_measured or not running.running:
        return []
    name, speculation = running.drafts.task, _with_merges(stage.deployment, learned).spec.speculation
    bounds = {
        names: task_bounds.bounds_of(_only(speculation, {name: names}), name) for names in subsets_of(running.running)
    }
    return options_of(rule, learned, running, bounds)


def _rule(stage: _Stage, learned: LearnedState, task: str) -> LoadDecision | None:
    """Return the decision for the present load with the rows that run.

    None while no step was timed, and where the task has no traffic.
    """
    speculation = _with_merges(stage.deployment, learned).spec.speculation
    times = StepTimeModel.fit(learned.costs, learned.wander)
    if times is None or not _is_active(learned, task, stage.now):
        return None
    at = loads.present_row(learned.load, stage.buckets)
    # Rows that were chosen under an earlier spec may lie outside of the bounds of the present one.
    rows = [
        row.running(task_bounds.bounds_of(speculation, row.task).nearest(row.shape))
        for row in plan_rows.rows_of(speculation, learned, stage.buckets)
        if row.load == at
    ]
    quiet = workload.idle(learned, [row.task for row in rows])
    busy = [row for row in rows if row.task not in quiet]
    if task not in {row.task for row in busy}:
        return None
    load = times.typical(stage.buckets, *at, stage.deployment.spec.engine.max_num_seqs)
    tasks = workload.tasks_at(AcceptanceModel(learned, speculation), busy, load, kv_tokens(stage.observed))
    search = ShapeSearch(times, load, tasks, workload.Objective(speculation.objective))
    return LoadDecision(speculation, learned, search, busy, stage.now, is_suspended=False, is_present=True)


# --- inputs of the choice -----------------------------------------------------------------------------------------


def _drafts_of(stage: _Stage, learned: LearnedState, task: TaskSpec) -> TaskDrafts:
    """Return the drafts of a task with the hashes that most workers report."""
    specs = {draft.name: draft for draft in stage.speculation.drafts}
    hashes: dict[str, list[str]] = {name: [] for name in specs}
    for report in stage.observed.reports:
        for draft in report.named_drafts:
            if draft.name in hashes and draft.hash:
                hashes[draft.name].append(draft.hash)
    named = {name: max(sorted(set(each)), key=each.count, default="") for name, each in hashes.items()}
    method = specs[task.draft].method if task.draft else stage.speculation.method
    return TaskDrafts(
        task=task.name,
        own_hash=named[task.draft] if task.draft else learned.draft,
        hashes={one.draft: named[one.draft] for one in task.merge},
        extensions={one.draft: one.depth for one in task.merge if one.depth},
        has_passes=method not in DRAFT_FREE,
    )


def _mode(speculation: SpeculationSpec, task: TaskSpec) -> str:
    """Return the mode that decides for a task, as for its depth."""
    if speculation.mode == "Off" or task.mode in ("Off", "Static"):
        return "Off" if speculation.mode == "Off" else str(task.mode)
    return speculation.mode if speculation.mode == "Advisory" or task.mode is None else task.mode


def _is_held(stage: _Stage, learned: LearnedState, task: str) -> bool:
    """Return whether nothing may change: the deployment is paused, or a pin says what the task runs."""
    pin = read_pin_state(stage.deployment, learned.pin).pin
    return stage.deployment.spec.paused or (pin is not None and pin.shape_of(task) is not None)


def _is_active(learned: LearnedState, task: str, now: float) -> bool:
    """Return whether something was drafted for the task within the last minute."""
    first = (cell.at for cell in learned.acceptance if (cell.task, cell.depth, cell.parent) == (task, 1, "main"))
    return now - max(first, default=0.0) <= PLANNING.window_seconds


# --- results ------------------------------------------------------------------------------------------------------


def _known(learned: LearnedState, task: str) -> MergeChoice | None:
    return next((one for one in learned.merges if one.task == task), None)


def _stored(learned: LearnedState, chosen: MergeChoice) -> LearnedState:
    known = _known(learned, chosen.task)
    if known == chosen:
        return learned
    merges = (*(one for one in learned.merges if one.task != chosen.task), chosen)
    return learned.model_copy(update={"merges": tuple(sorted(merges, key=lambda one: one.task))})


def _with_merges(deployment: Deployment, learned: LearnedState) -> Deployment:
    """Return the deployment as if its tasks declared the drafts that take part, and no others."""
    speculation = _only(deployment.spec.speculation, {one.task: one.drafts for one in learned.merges})
    if speculation is deployment.spec.speculation:
        return deployment
    return replace(deployment, spec=deployment.spec.model_copy(update={"speculation": speculation}))


def _only(speculation: SpeculationSpec, drafts: Mapping[str, Names]) -> SpeculationSpec:
    """Return the spec whose tasks merge these drafts only. Tasks that are not named stay."""
    tasks = tuple(
        task.model_copy(update={"merge": tuple(one for one in task.merge if one.draft in drafts[task.name])})
        if task.name in drafts
        else task
        for task in speculation.tasks
    )
    return speculation if tasks == speculation.tasks else speculation.model_copy(update={"tasks": tasks})


def _record(stage: _Stage, learned: LearnedState, before: str, step: Step) -> DecisionRecord:
    reasons = {
        "bounds": "the drafts of the task changed, and all of them take part until their credit is measured",
        "gain": step.choice.reason,
        "trial": "a trial of the dropped drafts begins"
        if step.choice.before is not None
        else "the trial was not measured",
    }
    reason = step.reason or reasons[step.because or "bounds"]
    return DecisionRecord(
        time=iso(stage.now),
        measured=history.measured(learned, step.choice.task),
        load=f"every load, task {step.choice.task}",
        before=before,
        after=choice.merge_text(step.choice.drafts, is_trial=step.choice.before is not None),
        expected_gain_percent=round(100 * step.choice.loss, 1) if step.reason and step.choice.loss else None,
        cause=step.because,
        reason=reason,
    )
