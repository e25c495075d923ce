"""One trace, one seed, some policies: runs them on the same arrivals and says what each cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from specdecode_operator.api.v1alpha1 import TreeSpec
from specdecode_simulator.policies.operator_loop import Ours
from specdecode_simulator.policies.oracle import Part, Shapes, Text
from specdecode_simulator.policies.registry import SCALERS, Tuned, controller
from specdecode_simulator.records.acceptance_walks import Form
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.traces.catalogue import named
from specdecode_simulator.traces.job import Job
from specdecode_simulator.traces.trace import Trace
from specdecode_simulator.world.fleet import POLL_SECONDS, Fleet

ANSWERED = (1.03, 1.06)
"""Largest costs of the shape in use over the best shape at which a step of acceptance counts as answered.

The first is the gain that hysteresis requires of a move. The second is twice that, because a gain of 3 % where at most
5 % can be gained takes long to be shown with 90 % confidence.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one run. ``time_per_token`` is mean decode seconds of a request per token, over the whole trace."""

    time_per_token: float
    plan_changes_per_hour: float
    """Published plans; for rules inside an engine, changes of shape for equal requests, by worker."""
    slo_misses: float
    """Share of requests whose first token or whose mean time between tokens was late."""
    replica_hours: float
    ttft_p95: float
    arrivals: int
    finished: int
    in_flight: int
    given_up: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    figures: Figures
    decisions: tuple[Mapping[str, Any], ...] = ()
    answers: tuple[Mapping[str, float], ...] = ()
    """For each step of acceptance: seconds and drafts until the shape in use cost at most ``within`` times the best."""
    replicas: tuple[int, ...] = ()


def run_trace(
    trace_name: str,
    hours: float,
    seed: int,
    policies: Iterable[str],
    library: Library,
    tuned: Tuned,
    known: Mapping[str, Run] = MappingProxyType({}),
    poll_seconds: float = POLL_SECONDS,
) -> Iterator[tuple[str, Run]]:
    """Ours runs first on scaled traces: depth policies are compared at its replicas. What is ``known`` runs no more."""
    trace = named(trace_name, hours)
    wanted = list(dict.fromkeys(policies))
    trajectory: tuple[int, ...] | None = None
    if trace.family == "scaling":
        ours = known.get("ours") or one("ours", trace, library, seed, tuned, None, poll_seconds)
        trajectory = ours.replicas
        if "ours" in wanted:
            yield "ours", ours
            wanted.remove("ours")
    for name in wanted:
        if name in SCALERS and trace.family != "scaling":
            continue
        yield name, known.get(name) or one(name, trace, library, seed, tuned, trajectory, poll_seconds)


def one(
    name: str,
    trace: Trace,
    library: Library,
    seed: int,
    tuned: Tuned,
    trajectory: tuple[int, ...] | None,
    poll_seconds: float = POLL_SECONDS,
) -> Run:
    """Run one policy on one trace."""
    decides = controller(name, trace, library, seed, tuned, trajectory)
    ours = decides if isinstance(decides, Ours) else None
    fleet = Fleet(trace, library, seed, poll_seconds, is_reported=ours is not None)
    fleet.run(decides)
    return Run(
        figures=_figures(fleet, _changes(fleet, decides)),
        decisions=tuple({"seconds": at, **change.model_dump()} for at, change in ours.log) if ours else (),
        answers=tuple(_answers(fleet, ours)) if ours else (),
        replicas=tuple(fleet.trajectory),
    )


def _changes(fleet: Fleet, decides: Any) -> float:
    inner = getattr(decides, "inner", decides)
    versions = getattr(inner, "versions", None)
    if versions is not None:
        return float(versions)
    return sum(worker.switches for worker in fleet.workers) / max(1, len(fleet.workers))


def _figures(fleet: Fleet, changes: float) -> Figures:
    trace, arrived = fleet.trace, fleet.jobs[: fleet.arrivals]
    seconds = sum(worker.decode_seconds for worker in fleet.workers)
    tokens = sum(worker.tokens for worker in fleet.workers)
    firsts = sorted(job.first - job.arrived for job in arrived if job.first is not None)
    finished = sum(job.done is not None for job in arrived)
    return Figures(
        time_per_token=seconds / max(tokens, 1.0),
        plan_changes_per_hour=3600 * changes / trace.seconds,
        slo_misses=sum(_missed(job, trace) for job in arrived) / max(1, len(arrived)),
        replica_hours=fleet.replica_seconds / 3600,
        ttft_p95=firsts[int(0.95 * len(firsts))] if firsts else 0.0,
        arrivals=len(arrived),
        finished=finished,
        in_flight=fleet.in_flight,
        given_up=fleet.given_up,
        tokens=int(tokens),
    )


def _missed(job: Job, trace: Trace) -> bool:
    if job.first is None:
        return trace.seconds - job.arrived > trace.ttft_seconds
    late = job.first - job.arrived > trace.ttft_seconds
    return late or (job.done is not None and job.done - job.first > trace.ttit_seconds * (job.output - 1))


def _answers(fleet: Fleet, ours: Ours) -> Iterator[Mapping[str, float]]:
    """Yield how long the plan took to follow each step of acceptance.

    Only the first kind steps. Both the shape in use and the costs are those at the trace's mean load.
    """
    trace, load = fleet.trace, _mean_load(fleet)
    ends = [*trace.steps_at[1:], trace.seconds]
    for begin, end in zip(trace.steps_at, ends, strict=False):
        looks = [look for look in ours.looks if begin < look.at <= end]
        before = [look.drafts for look in ours.looks if look.at <= begin]
        if not looks or not before:
            continue
        costs = _Costs(fleet, begin + 1.0, ours.tree)
        for within in ANSWERED:
            kind = trace.kinds[0].label
            good = next((look for look in looks if costs.of(look.form(*load, kind)) <= within * costs.best), None)
            last = good or looks[-1]
            taken = {"seconds": last.at - begin, "drafts": last.drafts - before[-1]}
            yield {"at": begin, "within": within, **taken, "answered": float(good is not None)}


class _Costs:
    """Seconds per token at the mean load and the acceptance at ``at``."""

    def __init__(self, fleet: Fleet, at: float, tree: TreeSpec) -> None:
        trace, kind = fleet.trace, fleet.trace.kinds[0]
        batch, context = _mean_load(fleet)
        self._parts = (Part(batch, (Text(kind.domain, kind.quality(at)),)),)
        self._kv_tokens = batch * context
        self._shapes = Shapes(fleet.library.records, fleet.library.tables[trace.table], tree)
        self.best = self.of(*self._shapes.best(self._parts, self._kv_tokens))

    def of(self, form: Form) -> float:
        return 1 / self._shapes.pace(self._parts, [form], self._kv_tokens)


def _mean_load(fleet: Fleet) -> tuple[float, float]:
    """Return the sequences of a mean step of this run, and the KV tokens of one."""
    trace, kind = fleet.trace, fleet.trace.kinds[0]
    busy = sum(worker.decode_seconds for worker in fleet.workers) / trace.seconds / max(1, len(fleet.pods))
    return max(1.0, round(busy)), kind.prompt + kind.output / 2


def as_json(run: Run) -> dict[str, Any]:
    return asdict(run)


def of_json(document: Mapping[str, Any]) -> Run:
    """``as_json`` read back. Raises KeyError or TypeError on what is none."""
    return Run(
        figures=Figures(**document["figures"]),
        decisions=tuple(document["decisions"]),
        answers=tuple(document["answers"]),
        replicas=tuple(document["replicas"]),
    )
