"""What should be so: plan, replicas, pod template and children, from what was observed and remembered. Pure.

Where planning, scaling (through sizing) and manifests meet; it gives every number a single owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from specdecode_operator import history, manifests, planning, silence, steering
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.measurements import Delta, difference, fleet
from specdecode_operator.memory import WINDOW_SECONDS, Kept, Memory, TemplateMemory
from specdecode_operator.pins import Pin
from specdecode_operator.planning import Change, Chosen
from specdecode_operator.planning.loads import bucket_text
from specdecode_operator.records import Decision, Defaults, Deployment, Figures, Manifest, Observed
from specdecode_operator.sizing import kv_tokens, size
from specdecode_operator.suspects import verdicts
from specdecode_worker.contract import Buckets, Plan, Report, TreeShape

LEAST_READING_SECONDS = 2.0
"""Readings closer together than this wait for the next: events cause looks at any time."""
PUBLISH_SECONDS = 30.0


def decide(deployment: Deployment, observed: Observed, defaults: Defaults, *, now: float) -> tuple[Decision, Memory]:
    """Raises SpecError when the spec asks for what cannot be."""
    found = planning.buckets(deployment.spec.workers.max_num_seqs)
    memory, deltas = _read(observed, found, now)
    kept = steering.remembered(deployment, memory.kept)
    kept = kept.model_copy(update={"pods": planning.learn_pods(kept, deltas, now=now)})
    memory, delta = _together(observed, replace(memory, kept=kept), deltas, now)
    kept = planning.learn(kept, delta, now=now) if delta else _new_draft(kept, observed)
    kept = history.realised(kept, delta, found) if delta else kept
    before = kept
    kept, pin, problem = steering.pinned(deployment, kept)
    kept, plan, changes, recommended = _plan(deployment, observed, kept, pin, found, now)
    watched, kept = verdicts(deployment, observed, kept, plan, now=now)
    sized, kept = size(deployment, observed, kept, memory, delta, now=now)
    sized, kept = steering.advised(deployment, sized, before, kept)
    kept, steps = steering.recorded(deployment, before, kept, sized.wanted, now)
    changes = (*steps, *changes)
    kept = history.recorded(kept, changes, before.plan)
    template = _template(deployment, observed, kept, defaults)
    kept = kept.model_copy(update={"template": template})
    memory = replace(memory, kept=kept)
    figures, memory = _published(deployment, observed, memory, plan, found, now)
    depth = _depth_in_use(deployment, observed, kept, plan, found)
    decision = Decision(
        plan=plan,
        replicas=sized.replicas,
        desired=sized.desired,
        wanted=sized.wanted,
        capacity=sized.capacity,
        limited=sized.limited,
        deletion_costs=sized.deletion_costs,
        image=template.image,
        url=manifests.service_url(deployment.namespace, deployment.name),
        selector=",".join(f"{key}={value}" for key, value in manifests.selector(deployment.name).items()),
        children=_children(deployment, plan, template, sized.replicas),
        pushes=_pushes(observed, plan, deployment.uid, watched.own),
        suspects=watched.suspects,
        own_plans=watched.own_plans,
        recycle=watched.recycle,
        changes=changes,
        recommended=recommended,
        depth=depth,
        nodes=_nodes(plan, kept, found, depth),
        task_depths=_task_depths(deployment, plan, kept, found),
        figures=figures,
        first_acceptance=planning.first_acceptance(kept.acceptance),
        history=kept.history,
        pinned=kept.pin,
        pin_problem=problem,
        silent=silence.stale(observed, memory, now),
        urgent=_is_decision(observed.memory.kept, kept),
    )
    return decision, memory


# --- what the workers did -----------------------------------------------------------------------------------------


def _read(observed: Observed, found: Buckets, now: float) -> tuple[Memory, list[planning.PodDelta]]:
    """Moves the baselines; a worker without a new reading has no delta."""
    memory = observed.memory
    baselines: dict[str, Report] = {}
    deltas: list[planning.PodDelta] = []
    for worker in observed.workers:
        before = memory.baselines.get(worker.uid)
        baseline, delta = _one(before, worker.report, found, now)
        if baseline is not None:
            baselines[worker.uid] = baseline
            if delta is not None:
                deltas.append((worker.uid, baseline.boot_id, delta))
    return replace(memory, baselines=baselines), deltas


def _together(
    observed: Observed, memory: Memory, deltas: list[planning.PodDelta], now: float
) -> tuple[Memory, Delta | None]:
    """The fleet's delta, None when nobody has a new reading, and the window with it. What drafts of a suspected pod
    bring says nothing about the others'."""
    strange = planning.suspected(memory.kept)
    counted = [delta.without_acceptance() if uid in strange else delta for uid, _, delta in deltas]
    total = fleet(counted, at=now, draft=_draft(observed, memory.kept)) if counted else None
    window = (*memory.window, *([total] if total else []))
    recent = tuple(delta for delta in window if delta.at > now - WINDOW_SECONDS)
    return replace(memory, window=recent, silent=silence.counted(observed, now)), total


def _one(before: Report | None, after: Report | None, found: Buckets, now: float) -> tuple[Report | None, Delta | None]:
    """The next baseline of one worker, and what it did since the last."""
    if after is None or before is None:
        return after or before, None
    if before.boot_id == after.boot_id and 0 <= after.clock_seconds - before.clock_seconds < LEAST_READING_SECONDS:
        return before, None
    return after, difference(before, after, at=now, buckets=found)


def _draft(observed: Observed, kept: Kept) -> str:
    """Hash of the draft that most workers run; the remembered one while none says."""
    hashes = [report.draft.hash for report in observed.reports if report.draft.hash]
    return max(sorted(set(hashes)), key=hashes.count, default=kept.draft)


def _new_draft(kept: Kept, observed: Observed) -> Kept:
    """A draft is known as soon as a worker names it, long before its first token."""
    return planning.learn(kept, Delta(draft=_draft(observed, kept)), now=0)


# --- the plan -----------------------------------------------------------------------------------------------------


def _plan(
    deployment: Deployment, observed: Observed, kept: Kept, pin: Pin | None, found: Buckets, now: float
) -> tuple[Kept, Plan, tuple[DecisionRecord, ...], str | None]:
    """The kept rows and plan, and what changed. Advisory and a pause choose, tell, and change nothing."""
    speculation = deployment.spec.speculation
    chosen = Chosen(rows=kept.rows)
    if planning.plans(speculation):
        chosen = planning.choose(
            speculation,
            kept,
            found,
            max_num_seqs=deployment.spec.workers.max_num_seqs,
            now=now,
            held_back=_held_back(observed, kept.plan),
            kv_tokens=kv_tokens(observed),
            prompt=planning.prompt_of(kept),
        )
    follows = planning.follows(speculation) and not deployment.paused
    rows = steering.unpinned(chosen.rows, kept.rows, pin) if follows else kept.rows
    advised = speculation.mode == "Advisory" or (speculation.mode == "Auto" and pin is not None)
    recommended = _recommended(chosen, kept, found) if advised else None
    if deployment.paused and kept.plan is not None:
        return kept, kept.plan, (), recommended
    plan = planning.next_plan(
        speculation,
        uid=deployment.uid,
        draft=kept.draft,
        found=found,
        rows=rows,
        before=kept.plan,
        running=[report.plan for report in observed.reports],
        pin=pin,
    )
    moved = [change for change in chosen.changes if pin is None or pin.shape_of(change.row.task) is None]
    changes = _records(moved, kept, found, now) if follows else ()
    return kept.model_copy(update={"rows": rows, "plan": plan}), plan, changes, recommended


def _held_back(observed: Observed, plan: Plan | None) -> set[tuple[int, int]]:
    """Loads at which every guard that has a verdict on this plan's shapes runs plainly."""
    verdicts: dict[tuple[int, int], bool] = {}
    for report in observed.reports:
        if plan is not None and report.plan.version == plan.version:
            for cell in report.guard:
                load = (cell.concurrency, cell.context)
                verdicts[load] = verdicts.get(load, True) and cell.suppressed
    return {load for load, suppressed in verdicts.items() if suppressed}


def _records(changes: Iterable[Change], kept: Kept, found: Buckets, now: float) -> tuple[DecisionRecord, ...]:
    """One record for all rows of a task that moved alike; the row at the present load speaks for them."""
    present = planning.present_row(kept.load, found)
    groups: dict[tuple[str, TreeShape, TreeShape], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.row.task, change.before, change.row.shape), []).append(change)
    records = []
    for (task, before, after), group in groups.items():
        first = min(group, key=lambda change: (change.row.concurrency, change.row.context) != present)
        load = f"{bucket_text(found, first.row.concurrency, first.row.context)}, task {task}"
        records.append(
            DecisionRecord(
                time=history.when(now),
                measured=history.measured(kept, task),
                load=load if len(group) == 1 else f"{load} and {len(group) - 1} other loads",
                before=str(before),
                after=str(after),
                expected_gain_percent=None if first.gain is None else round(100 * first.gain, 1),
                reason=first.reason,
            )
        )
    return tuple(records)


def _recommended(chosen: Chosen, kept: Kept, found: Buckets) -> str | None:
    present = planning.present_row(kept.load, found)
    rows = [row for row in chosen.rows if (row.concurrency, row.context) == present]
    own = (row for row in rows if row.task == kept.load.task)
    return next((str(row.shape) for row in (*own, *rows)), None)


def _depth_in_use(deployment: Deployment, observed: Observed, kept: Kept, plan: Plan, found: Buckets) -> int | None:
    """Depth of the row at the present load, as soon as a worker says that it runs this plan."""
    if deployment.spec.speculation.method == "none":
        return None
    running = [report for report in observed.reports if report.plan.version == plan.version]
    if not running:
        return None
    if all(report.draft.problem for report in running):
        return 0
    concurrency, context = planning.present_row(kept.load, found)
    if (concurrency, context) in _held_back(observed, plan):
        return 0
    if not any(report.plan.matches_draft for report in running):
        return plan.initial.depth
    row = plan.row(concurrency, context, kept.load.task)
    return row.shape.depth if row else plan.initial.depth


def _nodes(plan: Plan, kept: Kept, found: Buckets, depth: int | None) -> int | None:
    """Draft tokens of the shape in use; none where plain decoding runs."""
    if not depth:
        return depth
    row = plan.row(*planning.present_row(kept.load, found), kept.load.task)
    return (row.shape if row else plan.initial).nodes


def _task_depths(deployment: Deployment, plan: Plan, kept: Kept, found: Buckets) -> dict[str, int]:
    concurrency, context = planning.present_row(kept.load, found)
    depths = {}
    for name in [task.name for task in deployment.spec.speculation.tasks]:
        row = plan.row(concurrency, context, name)
        depths[name] = row.shape.depth if row else plan.initial.depth
    return depths


def _pushes(observed: Observed, plan: Plan, uid: str, own: Collection[str]) -> tuple[str, ...]:
    """Addresses of workers whose report shows a lower version, or another plan than theirs; what a report says is
    what runs. Those in ``own`` get their own."""
    return tuple(
        worker.address
        for worker in observed.workers
        if worker.address
        and worker.report
        and not worker.leaving
        and worker.address not in own
        and (worker.report.plan.uid != uid or worker.report.plan.version < plan.version or worker.report.plan.quiet)
    )


# --- replicas, template, children ---------------------------------------------------------------------------------


def _template(deployment: Deployment, observed: Observed, kept: Kept, defaults: Defaults) -> TemplateMemory:
    """The remembered template while the rolling part of the spec is the same: an upgrade of the operator rolls nothing.

    When the memory was lost, the live workload says what it was made of.
    """
    spec_hash = manifests.rolling_hash(deployment.spec)
    known = kept.template
    workload = observed.workload
    if known is None and not observed.memory.found and workload and workload.spec_hash:
        template = dict(workload.template)
        known = TemplateMemory(
            spec_hash=workload.spec_hash, template=template, image=manifests.resolved_image(template)
        )
    if known and known.spec_hash == spec_hash and deployment.spec.workers.update_policy == "OnSpecChange":
        return known
    template = manifests.pod_template(deployment, defaults)
    return TemplateMemory(spec_hash=spec_hash, template=template, image=manifests.resolved_image(template))


def _children(deployment: Deployment, plan: Plan, template: TemplateMemory, replicas: int) -> tuple[Manifest, ...]:
    return (
        manifests.plan_config_map(deployment, plan),
        manifests.service(deployment),
        manifests.budget(deployment),
        manifests.workload(deployment, template.template, template.spec_hash, replicas),
    )


# --- what is told -------------------------------------------------------------------------------------------------


def _published(
    deployment: Deployment, observed: Observed, memory: Memory, plan: Plan, found: Buckets, now: float
) -> tuple[Figures | None, Memory]:
    """Figures for status, at most every half minute."""
    if now - memory.published_at < PUBLISH_SECONDS or not memory.window:
        return None, memory
    figures = planning.figures(
        memory.window,
        memory.kept.costs,
        _task_depths(deployment, plan, memory.kept, found),
        synthetic=any(report.synthetic is not None for report in observed.reports),
    )
    return figures, replace(memory, published_at=now)


def _is_decision(before: Kept, after: Kept) -> bool:
    """Whether something changed that must not be lost, rather than estimates that moved."""
    return (
        before.plan != after.plan
        or before.template != after.template
        or before.scaling.replicas != after.scaling.replicas
        or before.steering != after.steering
        or before.history != after.history
        or before.uid != after.uid
        or before.recycled_at != after.recycled_at
        or planning.suspected(before) != planning.suspected(after)
    )
