"""Two oracles. The clairvoyant picks the best shapes for every batch at every moment; the constrained one knows the
same truth but has what our operator has: a look every poll, rows by load buckets and tasks, depth bounds, and what
spec.speculation.stability asks of every row: a dwell, a least gain, so many changes an hour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdecode_operator.api.v1alpha1 import STABILITY, StabilityLimits
from specdecode_operator.planning.loads import buckets
from specdecode_simulator.policies.operator_loop import DEEPEST
from specdecode_simulator.records.acceptance_walks import Records, chain
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.records.step_times import StepTable
from specdecode_simulator.traces.trace import Trace
from specdecode_simulator.world.fleet import Fleet
from specdecode_simulator.world.plan_pilot import PlanPilot
from specdecode_simulator.world.segment import Load, Outcome, Segment
from specdecode_simulator.world.truth import Truth
from specdecode_worker.contract import Buckets, Plan, PlanRow, TreeShape

HOUR_SECONDS = 3600.0
LIMITS = STABILITY["Medium"]
_FIRST_CONTEXT = 400.0


class Part(NamedTuple):
    """``sequences`` that run the same depth; ``tokens[d]`` are the expected accepted tokens of a chain of d."""

    sequences: float
    tokens: tuple[float, ...]


def pace(table: StepTable, parts: Sequence[Part], depths: Sequence[int], kv_tokens: float) -> float:
    """Tokens a second, where every part runs its chain."""
    sequences = sum(part.sequences for part in parts)
    verify = sum(part.sequences * (depth + 1) for part, depth in zip(parts, depths, strict=True))
    tokens = sum(part.sequences * (1 + part.tokens[depth]) for part, depth in zip(parts, depths, strict=True))
    return tokens / table.seconds(sequences, verify, max(depths), kv_tokens)


def best_depths(table: StepTable, parts: Sequence[Part], kv_tokens: float, deepest: int = DEEPEST) -> tuple[int, ...]:
    """Depths of most tokens a second: for each number of passes, nodes by falling survival, every prefix tried."""
    zero = (0,) * len(parts)
    best, most = zero, pace(table, parts, zero, kv_tokens)
    nodes = sorted(
        (-(part.tokens[level] - part.tokens[level - 1]), level, index)
        for index, part in enumerate(parts)
        for level in range(1, deepest + 1)
    )
    for passes in range(1, deepest + 1):
        depths = list(zero)
        for _, level, index in nodes:
            if level > passes or level != depths[index] + 1:
                continue
            depths[index] = level
            # The deepest level may not be reached by this prefix: then fewer passes are drafted.
            rate = pace(table, parts, depths, kv_tokens)
            if rate > most:
                best, most = tuple(depths), rate
    return best


def accepted_tokens(records: Records, domain: str, quality: float) -> tuple[float, ...]:
    return tuple(records.mean_accepted(domain, quality, chain(depth)) for depth in range(DEEPEST + 1))


@dataclass(slots=True)
class ClairvoyantPilot:
    trace: Trace
    truth: Truth
    _known: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)

    def next(self, load: Load) -> Segment:
        """Choose the best depths. Loads that differ by a few requests of many share one computed answer."""
        qualities = tuple(round(self.truth.quality(group.kind, load.now), 2) for group in load.groups)
        counts = tuple(_coarse(count) for count in load.groups.values())
        context = 256.0 * max(0.25, round(load.kv_tokens / load.sequences / 256))
        key = (tuple(load.groups), counts, qualities, context)
        depths = self._known.get(key)
        if depths is None:
            parts = [
                Part(count, accepted_tokens(self.truth.records, self.trace.kinds[group.kind].domain, quality))
                for group, count, quality in zip(load.groups, counts, qualities, strict=True)
            ]
            depths = self._known[key] = best_depths(self.truth.table, parts, context * sum(counts))
        forms = {group: chain(depth) for group, depth in zip(load.groups, depths, strict=True)}
        return Segment(forms, 32)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        pass


def _coarse(count: int) -> float:
    return float(count if count <= 4 else 2 * round(count / 2) if count <= 12 else 4 * round(count / 4))


@dataclass(slots=True)
class Clairvoyant:
    trace: Trace

    def pilot(self, fleet: Fleet, index: int) -> ClairvoyantPilot:
        return ClairvoyantPilot(self.trace, fleet.truth(index))

    def poll(self, fleet: Fleet, now: float) -> int | None:
        return None


RowKey = tuple[int, int, str]
"""Buckets of concurrency and context, and the task."""


class Row(NamedTuple):
    depth: int
    moves: tuple[float, ...] = ()
    """When it did, of the last hour; that it was made is no move."""

    def may_move(self, now: float, limits: StabilityLimits) -> bool:
        recent = self._recent(now)
        rested = not recent or now - recent[-1] >= limits.min_dwell_seconds
        return rested and len(recent) < limits.max_changes_per_hour

    def moved(self, depth: int, now: float) -> Row:
        return Row(depth, (*self._recent(now), now))

    def _recent(self, now: float) -> tuple[float, ...]:
        return tuple(at for at in self.moves if now - at < HOUR_SECONDS)


@dataclass(slots=True)
class Constrained:
    """Oracle that knows acceptance and cost. It plans other loads than the present one by their bucket's middle."""

    trace: Trace
    library: Library
    limits: StabilityLimits = LIMITS
    versions: int = 0
    plan: Plan = field(default_factory=lambda: Plan(uid="simulated"))
    _rows: dict[RowKey, Row] = field(default_factory=dict)
    _known: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)
    _buckets: Buckets = field(default_factory=Buckets)
    _mix: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._buckets = buckets(self.trace.limits.max_num_seqs)
        self.plan = Plan(uid="simulated", buckets=self._buckets, guard=False, explore=0)
        self._replan(0.0, 1.0, _FIRST_CONTEXT, {})

    def pilot(self, fleet: Fleet, index: int) -> PlanPilot:
        return PlanPilot(self.trace.labels, self.plan, lambda running: 0.0)

    def poll(self, fleet: Fleet, now: float) -> int | None:
        running = [pod.worker.running for pod in fleet.ready if pod.worker.running]
        used = sum(pod.worker.kv_used for pod in fleet.ready)
        if running:
            self._remember([pod.worker.batch.composition() for pod in fleet.ready])
            self._replan(now, sum(running) / len(running), used / sum(running), self._mix)
        for pod in fleet.pods:
            if isinstance(pod.worker.pilot, PlanPilot):
                pod.worker.pilot.take(self.plan)
        return None

    def _remember(self, batches: Sequence[Mapping[tuple[int, int], int]]) -> None:
        """The mix over about half a minute: one moment's batch is no load."""
        for pair in {*self._mix, *(pair for one in batches for pair in one)}:
            count = sum(one.get(pair, 0) for one in batches)
            self._mix[pair] = 0.85 * self._mix.get(pair, float(count)) + 0.15 * count
        self._mix = {pair: count for pair, count in self._mix.items() if count > 0.02}

    def _replan(self, now: float, running: float, context: float, counts: Mapping[tuple[int, int], float]) -> None:
        rows = dict(self._rows)
        for concurrency, sequences in self._loads(running):
            rows.update(self._moves(now, concurrency, sequences, context, counts))
        if rows != self._rows:
            self._rows = rows
            self.versions += 1
            self.plan = replace_plan(self.plan, rows)

    def _moves(
        self, now: float, concurrency: int, sequences: float, context: float, counts: Mapping[tuple[int, int], float]
    ) -> dict[RowKey, Row]:
        """The rows of one load that move, where all together pay."""
        labels, parts = self._parts(now, sequences, counts)
        names = [self.trace.labels[label] for label in labels]
        tokens = max(64.0, round(context / 64) * 64.0)
        known = [self._rows.get((concurrency, 0, name)) for name in names]
        best = self._best(parts, round(sequences), tokens)
        allowed = tuple(self._allowed(row, depth, now) for row, depth in zip(known, best, strict=True))
        if not self._pays(known, parts, allowed, tokens):
            return {}
        return {
            (concurrency, bucket, name): row.moved(depth, now) if row else Row(depth)
            for name, depth in zip(names, allowed, strict=True)
            for bucket in range(len(self._buckets.context) + 1)
            if (row := self._rows.get((concurrency, bucket, name))) is None or row.depth != depth
        }

    def _allowed(self, row: Row | None, wanted: int, now: float) -> int:
        """Within its dwell a row stays, but for speculation that loses."""
        moves = row is None or wanted == 0 or row.may_move(now, self.limits)
        return wanted if moves or row is None else row.depth

    def _pays(
        self, known: Sequence[Row | None], parts: tuple[Part, ...], after: tuple[int, ...], tokens: float
    ) -> bool:
        """Return whether a move gains the least gain. Rows that do not exist yet are always made."""
        before = [row.depth for row in known if row is not None]
        if len(before) < len(after):
            return True
        table, kv = self.library.tables[self.trace.table], tokens * sum(part.sequences for part in parts)
        gain = pace(table, parts, after, kv) / pace(table, parts, before, kv) - 1
        return gain > 0 and gain >= self.limits.min_gain_percent / 100

    def _loads(self, running: float) -> Iterator[tuple[int, float]]:
        """(concurrency bucket, sequences): what runs where it is, else the middle of the bucket."""
        edges = self._buckets.concurrency
        for concurrency in range(len(edges) + 1):
            low = edges[concurrency - 1] if concurrency else 0
            high = edges[concurrency] if concurrency < len(edges) else self.trace.limits.max_num_seqs
            yield concurrency, running if low < running <= high else max(1.0, (low + 1 + high) / 2)

    def _parts(
        self, now: float, sequences: float, counts: Mapping[tuple[int, int], float]
    ) -> tuple[list[int], tuple[Part, ...]]:
        """The mix of labels, and what each may expect of the kinds that it holds."""
        kinds = self.trace.kinds
        mix: dict[tuple[int, int], float] = dict(counts)
        if not mix:
            for index, weight in enumerate(self.trace.mix(now)):
                mix[self.trace.labels.index(kinds[index].label), index] = max(weight, 1e-3)
        total = sum(mix.values())
        labels = sorted({label for label, _ in mix})
        parts = []
        for label in labels:
            own = {kind: count for (which, kind), count in mix.items() if which == label}
            weight = sum(own.values())
            known = {kind: self._tokens(kind, now) for kind in own}
            tokens = tuple(
                round(sum(own[kind] * known[kind][depth] for kind in own) / weight, 3) for depth in range(DEEPEST + 1)
            )
            parts.append(Part(round(sequences * weight / total * 2) / 2 or 0.5, tokens))
        return labels, tuple(parts)

    def _tokens(self, kind: int, now: float) -> tuple[float, ...]:
        described = self.trace.kinds[kind]
        return accepted_tokens(self.library.records, described.domain, described.quality(now))

    def _best(self, parts: tuple[Part, ...], sequences: int, tokens: float) -> tuple[int, ...]:
        key = (parts, sequences, tokens)
        if key not in self._known:
            table = self.library.tables[self.trace.table]
            count = sum(part.sequences for part in parts)
            self._known[key] = best_depths(table, parts, tokens * count)
        return self._known[key]


def replace_plan(plan: Plan, rows: Mapping[RowKey, Row]) -> Plan:
    """The next version, with these rows."""
    made = tuple(
        PlanRow(concurrency=concurrency, context=context, task=task, shape=TreeShape.chain(row.depth))
        for (concurrency, context, task), row in sorted(rows.items())
    )
    return plan.model_copy(update={"rows": made, "version": plan.version + 1})
