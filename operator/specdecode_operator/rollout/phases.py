"""The rollout of drafts: one function a phase, from the record and what is true now to the next record. Pure.

The record is stored before anything that follows from it. Everything that follows (assignment, capture, a trial, a Job)
is a function of the record and of what is in the cluster, so that an operator that was killed goes on from there. A
canary is judged by pairs of a worker's reports, each of which is counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from specdecode_operator.api.draft import (
    UNRESOLVED,
    CountedPair,
    Mode,
    Phase,
    SpecDecodeDraft,
    TrialRecord,
)
from specdecode_operator.api.status import Outcome, RunOutcome
from specdecode_operator.api.v1alpha1 import Cause, DistillationCaptureSpec, DraftLineageStatus
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.drafts.crossover import (
    TILTS,
    Block,
    CellKey,
    Cost,
    Crossover,
    CrossoverTuning,
    Evidence,
    Verdict,
    increments,
    log_mean,
    pair_difference,
    task_differences,
)
from specdecode_operator.drafts.job_status import problem_of_draft, published_prefix
from specdecode_operator.rollout.runs import (
    RUN_PHASES,
    Facts,
    TrainingReason,
    assignment_of,
    begun_from,
    begun_run,
    captured_conversations,
    choose_canary,
    draft_with,
    image_of,
    job_of_run,
    next_offer,
    obstacle_of_offer,
    obstacle_of_run,
    reason_to_train,
    spec_hash_of,
    storage_of,
    verdict_text,
    with_run_deleted,
    with_run_end,
)
from specdecode_operator.state.learned import DraftRecord
from specdecode_operator.times import iso, seconds_of
from specdecode_operator.types import Deployment, Observation, Worker
from specdecode_worker.contract import OTHER_TASK, Report, TrialCost, TrialPair
from specdecode_worker.contract.distillation import DistillationVerdict

GAIN_LIMIT = 3.0
"""Largest size of a bound of the gain, as a log ratio: twenty times as fast."""
BISECTIONS = 20
"""Halvings of the interval that has a bound; the rest is below a thousandth of a percent."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain in speed of the candidate, as a share: 0.1 is 10 % faster."""

    mean: float
    least: float | None
    """Lower bound, valid at every look; an error of at most 1 in 40. None while the pairs give none."""
    most: float | None
    """Upper bound, likewise."""

    def __str__(self) -> str:
        mean = f"{100 * self.mean:+.1f} %"
        if self.least is None or self.most is None:
            return f"{mean}, too few pairs for bounds"
        return f"{mean} ({100 * self.least:+.1f} to {100 * self.most:+.1f} %)"


def count_pairs(trial: TrialRecord, pairs: Iterable[TrialPair], tasks: Collection[str]) -> TrialRecord:
    """Return the trial with the pairs that were not counted yet.

    Args:
        trial: The trial so far.
        pairs: Newest pairs of the worker that runs it.
        tasks: Names of the tasks that are judged apart.
    """
    for pair in sorted(pairs, key=lambda one: one.index):
        if pair.index < trial.next_pair:
            continue
        counted = _counted(pair, tasks)
        known = (*trial.pairs, counted) if counted else trial.pairs
        trial = trial.model_copy(update={"pairs": known, "next_pair": pair.index + 1})
    return trial


def verdict_of(trial: TrialRecord) -> Verdict:
    """Return what the counted pairs say. It may be read after every pair."""
    tuning, test = CrossoverTuning(min_gain=trial.min_gain), Crossover()
    for pair in trial.pairs:
        test = test.add(pair.total, pair.tasks, tuning)
    return test.verdict(tuning)


def gain_of(trial: TrialRecord) -> Gain | None:
    """Return the mean gain and its bounds. None before the first pair."""
    if not trial.pairs:
        return None
    return _gain(tuple(pair.total for pair in trial.pairs))


def evidence_text(trial: TrialRecord | None) -> str:
    """Return the evidence in one line."""
    gain = gain_of(trial) if trial else None
    if trial is None or gain is None:
        return "no pair was counted"
    return f"{len(trial.pairs)} pairs, gain {gain}"


def _counted(pair: TrialPair, tasks: Collection[str]) -> CountedPair | None:
    """Return the differences of a pair. None if its blocks share no cell or its costs are unusable."""
    incumbent, candidate = _block(pair.incumbent), _block(pair.candidate)
    try:
        total = pair_difference(incumbent, candidate)
        by_task = task_differences(incumbent, candidate, sorted(tasks))
    except (ValueError, OverflowError, ZeroDivisionError):
        return None
    if total is None or not all(map(math.isfinite, (total, *by_task.values()))):
        return None
    return CountedPair(total=total, tasks=by_task)


def _block(costs: Iterable[TrialCost]) -> Block:
    return {
        CellKey(cost.task, cost.concurrency, cost.context): Cost(cost.sequence_seconds, cost.tokens) for cost in costs
    }


@lru_cache(maxsize=64)
def _gain(differences: tuple[float, ...]) -> Gain:
    """Return the gain, cached: status, metrics and Events ask for it again and again between two pairs."""
    scales, evidence = [], Evidence()
    for difference in differences:
        scales.append(evidence.scale())
        evidence = evidence.add(difference, 0.0)
    least = _bound(differences, scales)
    most = _bound([-difference for difference in differences], scales)
    mean = min(max(sum(differences) / len(differences), -GAIN_LIMIT), GAIN_LIMIT)
    return Gain(
        math.expm1(mean), None if least is None else math.expm1(least), None if most is None else math.expm1(-most)
    )


def _bound(differences: Sequence[float], scales: Sequence[float]) -> float | None:
    """Return the largest gain that the evidence excludes from below, as a log ratio. None if it excludes none."""
    low, high = -GAIN_LIMIT, GAIN_LIMIT
    if not _excludes(differences, scales, low):
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _excludes(differences, scales, middle) else (low, middle)
    return low


def _excludes(differences: Sequence[float], scales: Sequence[float], gain: float) -> bool:
    """Return whether the evidence decides against "the gain is at most this"."""
    logs = [0.0] * len(TILTS)
    for difference, scale in zip(differences, scales, strict=True):
        logs = [log + step for log, step in zip(logs, increments((difference - gain) / scale), strict=True)]
    return log_mean(logs) >= math.log(CrossoverTuning().evidence)


# The phases.

REFUSAL_SECONDS = 10.0
"""Time after an assignment before a worker's problem counts as a refusal of it: reports may show an older problem."""
MOVING_SECONDS = 1800.0
"""Time in which all workers must have loaded the assigned draft, long enough for a download by each of them."""
FAILURE_LIMIT = 3
"""Losses of the canary pod after which the candidate is rolled back."""
LOSS_LIMIT = 3
"""Losses of a run's Job after which the run fails."""
FIRST_RETRY_SECONDS = 60.0
"""Time from the loss of a Job to the next one; it doubles from loss to loss."""
_NO_CANDIDATE: Mapping[str, Any] = {"candidate": "", "canary_losses": 0, "is_confirmed": False, "trial": None}
_OF_SPEC: Mapping[str, Any] = {**_NO_CANDIDATE, "current": "", "previous": None}
_VERDICTS: Mapping[Verdict, tuple[Outcome, str]] = {
    Verdict.PROMOTE: ("Promoted", "the candidate is faster"),
    Verdict.ROLL_BACK: ("RolledBack", "the candidate is slower, as a whole or in a task"),
    Verdict.UNDECIDED: ("Undecided", "all pairs ran without enough evidence"),
}


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """Result of one step."""

    record: DraftRecord
    changes: tuple[DecisionRecord, ...] = ()
    """Transitions of this step for Events and history, oldest first."""


def step_rollout(deployment: Deployment, observed: Observation, *, now: float) -> RolloutStep:
    """Return the record after what was observed. A paused deployment keeps its record."""
    facts = Facts(deployment, observed, now)
    walk = _Walk(facts, observed.session.drafts)
    if deployment.spec.paused:
        return RolloutStep(walk.record)
    if walk.record.is_used:
        walk.note(mode=Mode(deployment.spec.draft_rollout.mode))
        _follow_spec(walk)
    for _ in Phase:
        before = walk.record.phase
        _STEPS[before](walk)
        if walk.record.phase is before:
            break
    _take_request(walk)
    walk.record = with_run_deleted(facts, walk.record)
    _run_canary(walk)
    return RolloutStep(walk.record, tuple(walk.changes))


@dataclass(slots=True)
class _Walk:
    """A record on its way through the phases."""

    facts: Facts
    record: DraftRecord
    changes: list[DecisionRecord] = field(default_factory=list)

    def note(self, **update: Any) -> None:
        """Change the record without an entry in the history."""
        self.record = self.record.model_copy(update=update)

    def move(
        self,
        phase: Phase,
        reason: str,
        *,
        cause: Cause = "failure",
        outcome: Outcome | None = None,
        run_outcome: RunOutcome | None = None,
        verdict: DistillationVerdict | None = None,
        **update: Any,
    ) -> None:
        """Enter a phase, with an entry in the history.

        Args:
            phase: The phase, which may be the present one.
            reason: Reason in a sentence.
            cause: Cause for the history.
            outcome: How the draft ends that is tried or in use, where it does not stay; or Promoted.
            run_outcome: How the run ends that is under way.
            verdict: Verdict of that run.
            update: Changes of the record.
        """
        before, now = self.record, self.facts.now
        after = before.model_copy(update={"phase": phase, **update})
        if after == before:
            return
        if phase is not before.phase or after.is_confirmed != before.is_confirmed:
            after = after.model_copy(update={"since": now})
        after = _concluded(before, after, outcome, reason, verdict, now)
        if before.phase in RUN_PHASES and phase not in RUN_PHASES:
            after = with_run_end(before, after, run_outcome or "Rejected", reason, verdict, self.facts)
        keep = {after.current, after.candidate, after.previous}
        self.record = after.model_copy(update={"uris": {one: uri for one, uri in after.uris.items() if one in keep}})
        self.changes.append(_change(before, self.record, reason, cause, verdict, now))


# --- what holds in every phase ------------------------------------------------------------------------------------


def _follow_spec(walk: _Walk) -> None:
    """Let a user's draft or model win: nothing that was measured or trained for the old pair is used."""
    spec, record, now = walk.facts.deployment.spec, walk.record, walk.facts.now
    draft, method = spec.speculation.draft.uri if spec.speculation.draft else "", spec.speculation.method
    reason = ""
    if (draft, method) != (record.spec_draft, record.method):
        reason = f"the draft of the spec is {draft or 'absent'} now, of method {method}"
    elif spec.model.target != record.target:
        reason = f"the target of the spec is {spec.model.target} now"
    if reason:
        walk.note(captures_deleted_before=now, spec_draft=draft, method=method, target=spec.model.target, spec_hash="")
        walk.move(Phase.SERVING, reason, cause="user", outcome="Superseded", run_outcome="Superseded", **_OF_SPEC)
    image = image_of(walk.facts.observed)
    if image and image != walk.record.image:
        is_other = bool(walk.record.image)
        walk.note(image=image)
        if is_other and walk.record.phase is Phase.CANARY:
            # Costs of the old image say nothing about the candidate on the new one.
            _roll_back(walk, f"the workers' image changed to {image}", "Superseded", cause="user")


def _rejection(walk: _Walk, *, of_tried: bool = False) -> str:
    """Return how a user ended the draft in use, or the one that is tried. Empty if not.

    Its SpecDecodeDraft was retired or deleted. What began in this step is not in its SpecDecodeDraft yet.
    """
    record = walk.record
    if record.since >= walk.facts.now or not (record.current or of_tried):
        return ""
    draft = draft_with(walk.facts, record, record.candidate if of_tried else record.current)
    if draft is None:
        return "the SpecDecodeDraft was deleted"
    is_kept = draft.spec.role == "Serving" or (of_tried and draft.spec.role == "Candidate")
    return "" if is_kept else f"the SpecDecodeDraft {draft.name} has the role {draft.spec.role}"


def _roll_back(walk: _Walk, reason: str, outcome: Outcome, *, cause: Cause = "failure") -> None:
    """End the trial of the candidate."""
    walk.move(Phase.ROLLING_BACK, reason, cause=cause, outcome=outcome, **_NO_CANDIDATE)


def _restore(walk: _Walk, reason: str, outcome: Outcome, *, cause: Cause = "failure") -> None:
    """Return to the draft before the one that is in use, if there is one."""
    previous = walk.record.previous
    if previous is not None:
        back = {"current": previous, "previous": "" if previous else None}
        walk.move(Phase.ROLLING_BACK, reason, cause=cause, outcome=outcome, **{**_NO_CANDIDATE, **back})


# --- phases ---------------------------------------------------------------------------------------------------------


def _serving(walk: _Walk) -> None:
    """No rollout is under way. In the phase Cooldown none begins by itself."""
    facts, record = walk.facts, walk.record
    if rejected := _rejection(walk):
        _restore(walk, rejected, "RolledBack", cause="user")
        return
    refusals, workers = _refusals(walk), len(_workers(walk))
    if record.current and 2 * len(refusals) >= max(1, workers):
        reason = f"{len(refusals)} of {workers} workers cannot load the promoted draft: {refusals[0]}"
        walk.move(Phase.COOLDOWN, reason, outcome="Refused", **_OF_SPEC)
        return
    cooldown = seconds_of(facts.deployment.spec.distillation.trigger.cooldown)
    if record.phase is Phase.COOLDOWN and facts.now - record.since >= cooldown:
        walk.move(Phase.SERVING, f"{record.phase} lasted {cooldown:.0f} s")
    _take_offer(walk)
    if (
        walk.record.phase is Phase.SERVING
        and (why := reason_to_train(facts))
        and not obstacle_of_run(facts, walk.record)
    ):
        _begin_run(walk, why)


def _take_offer(walk: _Walk) -> None:
    """Take the next draft up that is to serve or to be tried, once a worker runs the draft to compare it with."""
    facts, record = walk.facts, walk.record
    draft, incumbent = next_offer(facts.observed), record.current or spec_hash_of(facts)
    if draft is None or obstacle_of_offer(facts, record):
        return
    spec_hash = record.spec_hash if record.current else incumbent
    walk.note(**begun_from(facts), spec_hash=spec_hash, refusal="")
    if refusal := _refusal(walk, draft, incumbent):
        entry = {"hash": draft.id, "uri": draft.spec.uri, "time": iso(facts.now), "outcome": "Refused"}
        walk.record = walk.record.with_ended(DraftLineageStatus(**entry, reason=refusal[:1000]))
        walk.note(refusal=refusal)
        return
    replaced = None if record.current else draft_with(facts, record, draft.spec.replaces or "")
    uris = {one.id: one.spec.uri for one in (draft, replaced) if one is not None}
    walk.note(uris={**record.uris, **uris})
    if draft.spec.role == "Serving":
        previous = replaced.id if replaced else record.current
        _promote(walk, f"the role of {draft.name} is Serving", cause="user", candidate=draft.id, previous=previous)
        return
    reason = f"{draft.name} offers {draft.spec.uri}; it is compared with {incumbent[:12]}"
    walk.move(Phase.CANARY, reason, cause="user", candidate=draft.id)


def _refusal(walk: _Walk, draft: SpecDecodeDraft, incumbent: str) -> str:
    """Return why an offered draft is not taken up; empty if it is."""
    base, record = draft.spec.base, walk.record
    if draft.id == incumbent:
        return f"the workers run the candidate {incumbent[:12]} already"
    if base is not None and (base.target, base.draft, base.method) != (record.target, record.spec_draft, record.method):
        return f"it is of {base.target} with the draft {base.draft}, and spec.base says so"
    return ""


def _take_request(walk: _Walk) -> None:
    """Take a request to train up that was not carried out yet, or note why it is not."""
    request = walk.facts.deployment.spec.distillation.trigger.request
    if request is not None and request != walk.record.request:
        obstacle = obstacle_of_run(walk.facts, walk.record)
        walk.note(request=request, run_refusal=obstacle)
        if not obstacle:
            _begin_run(walk, TrainingReason("user", f"a user requested {request!r}"))


def _begin_run(walk: _Walk, why: TrainingReason) -> None:
    """Begin a training run, which nothing prevents."""
    walk.move(Phase.COLLECTING, why.text, cause=why.cause, **begun_run(walk.facts, walk.record, why))


def _collecting(walk: _Walk) -> None:
    """Requests are captured until there are enough for a run."""
    facts, distillation = walk.facts, walk.facts.deployment.spec.distillation
    if _run_is_over(walk):
        return
    if distillation.capture is None:
        walk.move(Phase.COOLDOWN, "distillation.capture is absent now", cause="user", **_NO_CANDIDATE)
        return
    needed = distillation.trigger.min_conversations
    count = captured_conversations(facts.observed, walk.record, since_plan=True)
    if count >= needed and not facts.observed.jobs_problem:
        reason = f"the workers hold {count} captured conversations, of {needed} that a run needs"
        walk.move(Phase.DISTILLING, reason, cause="run")
        return
    count = captured_conversations(facts.observed, walk.record)
    _run_expires(walk, 0.0, f" with {count} of {needed} captured conversations")


def _distilling(walk: _Walk) -> None:
    """A Job trains a draft. It is created while ``job_uid`` is empty, and lost if it was seen and is gone."""
    facts, run = walk.facts, walk.record.run
    if _run_is_over(walk) or run is None:
        return
    if not facts.observed.jobs_problem:  # Jobs that cannot be listed are not lost.
        job = job_of_run(facts.observed.jobs, facts.deployment, run)
        if job is None and run.job_uid:
            _lose_job(walk)
        elif job is not None:
            if job.uid != run.job_uid:
                walk.note(run=run.model_copy(update={"job_uid": job.uid}))
            if job.status.verdict is not None:
                _judge(walk, job.status.verdict)
            elif job.status.state.is_final:
                words = f": {job.status.reason}" if job.status.reason else ""
                _fail_run(walk, f"Job {job.name}: {job.status.state}{words}")
    if walk.record.phase is Phase.DISTILLING:
        _run_expires(walk, facts.deployment.spec.distillation.time_limit_seconds, "")


def _run_is_over(walk: _Walk) -> bool:
    """End a run that a user ended, or whose place changed. Return whether it ended."""
    facts, record, run = walk.facts, walk.record, walk.record.run
    if run is None:
        walk.move(Phase.COOLDOWN, "the stored run could not be read", **_NO_CANDIDATE)
        return True
    rejected, storage = _rejection(walk), storage_of(facts.deployment.spec)
    if rejected and record.previous is not None:
        _restore(walk, rejected, "RolledBack", cause="user")
        return True
    reason = ""
    if facts.deployment.spec.distillation.trigger.reject == run.id:
        reason = f"distillation.trigger.reject names {run.id}"
    elif storage != {"claim": run.claim, "bucket": run.bucket, "endpoint": run.endpoint}:
        reason = f"distillation.storage is {' '.join(filter(None, storage.values())) or 'absent'} now"
    if reason:
        walk.move(Phase.COOLDOWN, reason, cause="user", **_NO_CANDIDATE)
    return bool(reason)


def _run_expires(walk: _Walk, more: float, what: str) -> None:
    """End a run whose phase lasts longer than its limit.

    Captured requests that are older than maxAge are deleted, so collecting for longer collects no more. A Job may wait
    in a queue, but not until the requests that it was created for are gone.
    """
    capture = walk.facts.deployment.spec.distillation.capture or DistillationCaptureSpec()
    limit = seconds_of(capture.max_age) + more
    if walk.facts.now - walk.record.since >= limit:
        reason = f"{walk.record.phase} lasted {limit:.0f} s{what}"
        walk.move(Phase.COOLDOWN, reason, run_outcome="Expired", **_NO_CANDIDATE)


def _lose_job(walk: _Walk) -> None:
    """Take note of a Job that was seen and is gone. It is created again after a while, or the run fails."""
    run = walk.record.run
    assert run is not None, "the caller has one"
    losses = run.losses + 1
    pause = FIRST_RETRY_SECONDS * 2.0 ** (losses - 1)
    update = {"job_uid": "", "losses": losses, "retry_at": walk.facts.now + pause}
    reason = f"the Job of run {run.id} is gone (loss {losses} of {LOSS_LIMIT})"
    if losses >= LOSS_LIMIT:
        walk.note(run=run.model_copy(update=update))
        _fail_run(walk, reason)
        return
    lost = run.model_copy(update=update)
    walk.move(Phase.DISTILLING, f"{reason}; it is created again in {pause:.0f} s", run=lost)


def _fail_run(walk: _Walk, reason: str, verdict: DistillationVerdict | None = None) -> None:
    walk.move(Phase.COOLDOWN, reason, run_outcome="Failed", verdict=verdict, **_NO_CANDIDATE)


def _judge(walk: _Walk, verdict: DistillationVerdict) -> None:
    """Follow the verdict of a run. Its draft is taken only from the place that the Job was given."""
    record, facts, run = walk.record, walk.facts, walk.record.run
    assert run is not None, "the caller has one"
    deleted: dict[str, Any] = {"captures_deleted_before": facts.now}
    words, reason = "; ".join(verdict.reasons), verdict_text(verdict)
    if verdict.verdict == "failed" and verdict.failure == "poisoned":
        reason = f"the run failed (poisoned): {words}"
        walk.move(Phase.COOLDOWN, reason, run_outcome="Poisoned", verdict=verdict, **_NO_CANDIDATE, **deleted)
        return
    if verdict.verdict == "failed":
        _fail_run(walk, f"the run failed ({verdict.failure}): {words}", verdict)
        return
    if verdict.verdict != "better":
        walk.move(Phase.COOLDOWN, reason, cause="run", run_outcome="NotBetter", verdict=verdict, **deleted)
        return
    draft = verdict.draft
    problem = problem_of_draft(draft, published_prefix(run.place, facts.deployment.name))
    if draft is not None and not problem and draft.hash == (record.current or record.spec_hash):
        problem = f"the new draft {draft.hash[:12]} is the one in use"
    if draft is None or problem:
        _fail_run(walk, problem, verdict)
        return
    walk.note(uris={**record.uris, draft.hash: draft.uri})
    reason, update = f"{draft.uri} is {reason}", {"candidate": draft.hash, **deleted}
    if record.mode is Mode.DIRECT:
        _promote(walk, f"mode Direct: {reason}", cause="run", run_outcome="Better", verdict=verdict, **update)
    else:
        walk.move(Phase.CANARY, reason, cause="run", run_outcome="Better", verdict=verdict, **update)


def _promote(walk: _Walk, reason: str, *, candidate: str, previous: str | None = None, **more: Any) -> None:
    """Assign a draft to all workers."""
    before = walk.record.current if previous is None else previous
    update = {"candidate": candidate, "current": candidate, "previous": before, "is_confirmed": True}
    walk.move(Phase.PROMOTING, reason, outcome="Promoted", **{**more, **update})


def _canary(walk: _Walk) -> None:
    """One worker tries the candidate."""
    record, facts = walk.record, walk.facts
    rejected, retired = _rejection(walk, of_tried=True), _rejection(walk)
    draft = draft_with(facts, record, record.candidate)
    if draft is not None and draft.spec.role == "Serving":
        reason = f"its role is Serving: {evidence_text(record.trial)}"
        _promote(walk, reason, cause="user", candidate=record.candidate)
        return
    if rejected:
        _roll_back(walk, rejected, "Rejected", cause="user")
    elif retired:
        _roll_back(walk, f"the draft in use ended: {retired}", "Superseded", cause="user")
    if retired:
        _restore(walk, retired, "RolledBack", cause="user")
    if rejected or retired:
        return
    if record.is_confirmed:
        if record.mode is not Mode.MANUAL:
            reason = f"mode is {record.mode} now: {evidence_text(record.trial)}"
            _promote(walk, reason, cause="user", candidate=record.candidate)
    elif record.trial is not None and record.trial.pod:
        _follow_trial(walk, record.trial)
    limit = seconds_of(facts.deployment.spec.draft_rollout.max_duration)
    if walk.record.phase is Phase.CANARY and facts.now - walk.record.since >= limit:
        _roll_back(walk, f"{Phase.CANARY} lasted {limit:.0f} s: {evidence_text(walk.record.trial)}", "Expired")


def _follow_trial(walk: _Walk, trial: TrialRecord) -> None:
    """Follow the loss of the canary pod, a refusal, new pairs, and a verdict."""
    record, workers = walk.record, walk.facts.observed.workers
    worker = next((one for one in workers if one.uid == trial.pod_uid and not one.leaving), None)
    if lost := _loss_of(worker, trial):
        losses = record.canary_losses + 1
        reason = f"pod {trial.pod}: {lost} (loss {losses} of {FAILURE_LIMIT})"
        if losses >= FAILURE_LIMIT:
            _roll_back(walk, reason, "Failed")
            return
        walk.move(Phase.CANARY, reason, canary_losses=losses, trial=_without_pod(trial))
        return
    state = worker.report.trial if worker is not None and worker.report is not None else None
    if state is None or state.id != trial.id:
        return
    if state.state == "Failed":
        _roll_back(walk, f"pod {trial.pod}: {state.problem or 'the draft could not be loaded'}", "Refused")
        return
    if record.candidate.startswith(UNRESOLVED):
        if state.hash:
            _resolve(walk, trial, state.hash)
        return
    tasks = (*(task.name for task in walk.facts.deployment.spec.speculation.tasks), OTHER_TASK)
    counted = count_pairs(trial, state.pairs, tasks)
    if counted == trial:
        return
    walk.note(trial=counted)
    outcome, words = _VERDICTS.get(verdict_of(counted), (None, ""))
    reason = f"{words}: {evidence_text(counted)}"
    if outcome == "Promoted" and record.mode is Mode.MANUAL:
        walk.move(Phase.CANARY, reason, cause="canary", is_confirmed=True)
    elif outcome == "Promoted":
        _promote(walk, reason, cause="canary", candidate=record.candidate)
    elif outcome is not None:
        _roll_back(walk, reason, outcome, cause="canary")


def _resolve(walk: _Walk, trial: TrialRecord, found: str) -> None:
    """Note the hash that a worker reported for the candidate, and start its trial again."""
    record = walk.record
    uri, incumbent = record.uris[record.candidate], record.current or record.spec_hash
    if found == incumbent:
        _roll_back(walk, f"{uri}: the workers run the candidate {found[:12]} already", "Refused")
        return
    uris = {one: place for one, place in record.uris.items() if one != record.candidate}
    walk.note(candidate=found, uris={**uris, found: uri}, trial=_without_pod(trial))


def _promoting(walk: _Walk) -> None:
    """All workers load the promoted draft."""
    if rejected := _rejection(walk):
        _restore(walk, rejected, "RolledBack", cause="user")
    elif refusals := _refusals(walk):
        _restore(walk, refusals[0], "Refused")
    elif converged := _convergence(walk):
        walk.move(Phase.COOLDOWN, converged, cause="canary", **_NO_CANDIDATE)
    elif walk.facts.now - walk.record.since >= MOVING_SECONDS:
        _restore(walk, f"{Phase.PROMOTING} lasted {MOVING_SECONDS:.0f} s", "Expired")


def _rolling_back(walk: _Walk) -> None:
    """All workers return to the draft before."""
    if rejected := _rejection(walk):
        _restore(walk, rejected, "RolledBack", cause="user")
    elif refusals := _refusals(walk):
        # The incumbent does not load any more: only the draft of the spec is left.
        walk.move(Phase.COOLDOWN, refusals[0], outcome="Refused", current="", previous=None)
    elif converged := _convergence(walk):
        walk.move(Phase.COOLDOWN, converged, cause="canary")
    elif walk.facts.now - walk.record.since >= MOVING_SECONDS:
        walk.move(Phase.COOLDOWN, f"{Phase.ROLLING_BACK} lasted {MOVING_SECONDS:.0f} s")


_STEPS: Mapping[Phase, Callable[[_Walk], None]] = {
    Phase.SERVING: _serving,
    Phase.COLLECTING: _collecting,
    Phase.DISTILLING: _distilling,
    Phase.CANARY: _canary,
    Phase.PROMOTING: _promoting,
    Phase.ROLLING_BACK: _rolling_back,
    Phase.COOLDOWN: _serving,
}


# --- what workers report ----------------------------------------------------------------------------------------------


def _workers(walk: _Walk) -> list[Worker]:
    return [worker for worker in walk.facts.observed.workers if worker.ready and not worker.leaving]


def _reports(walk: _Walk) -> list[Report] | None:
    """Return the reports on the assignment of the record. None before it is pushed: older reports say nothing."""
    plan = walk.facts.observed.session.learned.plan
    if plan is None or plan.assignment != assignment_of(walk.record, walk.facts.deployment):
        return None
    return [one.report for one in _workers(walk) if one.report and one.report.plan.version >= plan.version]


def _refusals(walk: _Walk) -> list[str]:
    """Return the reasons of workers that do not run the assigned draft and load none."""
    current = walk.record.current or walk.record.spec_hash
    if walk.facts.now - walk.record.since < REFUSAL_SECONDS:
        return []
    return [
        f"worker {report.worker}: {report.draft.problem or report.draft.swap_problem}"
        for report in _reports(walk) or []
        if report.draft.problem or report.draft.swap_problem
        if report.draft.hash != current and report.draft.pending is None
    ]


def _convergence(walk: _Walk) -> str:
    """Return that all workers run the assigned draft; empty while they do not."""
    reports, workers, workload = _reports(walk), _workers(walk), walk.facts.observed.workload
    current = walk.record.current or walk.record.spec_hash
    if reports is None or len(reports) < len(workers) or not all(_runs(report, current) for report in reports):
        return ""
    is_none_wanted = workload is not None and workload.wanted == 0
    return f"all workers ({len(workers)}) run {current[:12]}" if workers or is_none_wanted else ""


def _runs(report: Report, draft: str) -> bool:
    return report.draft.hash == draft and report.draft.pending is None and report.trial is None


def _loss_of(worker: Worker | None, trial: TrialRecord) -> str:
    """Return how the worker that ran the trial was lost; empty if it was not."""
    if worker is None:
        return "it is gone"
    return "it restarted" if worker.report is not None and worker.report.boot_id != trial.boot else ""


def _without_pod(trial: TrialRecord) -> TrialRecord:
    return trial.model_copy(update={"pod": "", "pod_uid": "", "boot": ""})


def _run_canary(walk: _Walk) -> None:
    """Begin a trial in the phase Canary, with a pod that runs it if one is able to; end it in others."""
    record, facts = walk.record, walk.facts
    if record.phase is not Phase.CANARY:
        walk.note(**({"trial": None} if record.trial else {}))
        return
    if record.is_confirmed:
        return
    spec = facts.deployment.spec.draft_rollout
    trial = record.trial or TrialRecord(block_requests=spec.block_requests, min_gain=spec.min_gain_percent / 100)
    is_off = facts.deployment.spec.speculation.mode == "Off"
    trial = _without_pod(trial) if is_off else trial  # Without drafts both blocks of a pair are alike.
    worker = None if is_off or trial.pod else choose_canary(facts.observed, record.current or record.spec_hash)
    if worker is not None and worker.report is not None:
        # Another id for every pod: a worker that restarted may run counted pairs again, by the plan that it mounts.
        chosen = {
            "id": f"{record.candidate[:40]}-{int(facts.now):x}",
            "pod": worker.name,
            "pod_uid": worker.uid,
            "boot": worker.report.boot_id,
            "first_pair": trial.next_pair,
        }
        trial = trial.model_copy(update=chosen)
    walk.note(trial=trial)


# --- lineage and history --------------------------------------------------------------------------------------------


def _concluded(
    before: DraftRecord,
    after: DraftRecord,
    outcome: Outcome | None,
    reason: str,
    verdict: DistillationVerdict | None,
    now: float,
) -> DraftRecord:
    """Return the record with the end of a trial or a promotion in its lineage, and with the verdict in words."""
    is_promoted = outcome == "Promoted"
    ended = after.current if is_promoted else before.candidate or before.current
    if after.is_confirmed and not before.is_confirmed and not is_promoted:
        waits = f"{before.candidate[:12]} waits for its role Serving (kubectl specdecode promote): {reason}"
        return after.model_copy(update={"last_verdict": waits[:1000]})
    is_dropped = ended and ended not in (after.candidate, after.current)
    if outcome is None or not (is_promoted or is_dropped):
        return after
    gain = gain_of(before.trial) if before.trial else None
    mean = gain.mean if gain else verdict.gain.estimate if verdict and verdict.gain else None
    entry = DraftLineageStatus(
        hash=ended,
        uri=after.uris.get(ended),
        time=iso(now),
        outcome=outcome,
        pairs=len(before.trial.pairs) if before.trial else 0,
        gain_percent=None if mean is None else round(100 * mean, 1),
        reason=reason[:1000],
    )
    words = f"{outcome} {ended[:12]}: {reason}"[:1000]
    refusal = reason[:1000] if outcome == "Refused" else ""
    return after.with_ended(entry).model_copy(update={"last_verdict": words, "refusal": refusal})


def _change(
    before: DraftRecord,
    after: DraftRecord,
    reason: str,
    cause: Cause,
    verdict: DistillationVerdict | None,
    now: float,
) -> DecisionRecord:
    gain = gain_of(before.trial) if before.trial else None
    is_promoted = after.current != before.current and after.current == before.candidate
    expected = verdict.gain if verdict else None
    return DecisionRecord(
        time=iso(now),
        kind="Draft",
        load="drafts",
        before=_state_text(before),
        after=_state_text(after),
        measured=evidence_text(before.trial) if before.trial else None,
        expected_gain_percent=round(100 * expected.estimate, 1) if expected else None,
        realised_gain_percent=round(100 * gain.mean, 1) if gain and is_promoted else None,
        cause=cause,
        reason=reason[:4000],
    )


def _state_text(record: DraftRecord) -> str:
    draft = record.candidate or record.current
    return f"{record.phase} {draft[:12]}" if draft else f"{record.phase} with the draft of the spec"
