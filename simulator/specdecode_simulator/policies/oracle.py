"""Two oracles. The clairvoyant picks the best shapes for every batch at every moment; the constrained one knows the
same truth but has what our operator has: a look every poll, rows by load buckets and tasks, depth bounds, and what
spec.speculation.stability asks of every row: a dwell, a least gain, so many changes an hour.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from specdecode_operator.api.v1alpha1 import STABILITY, StabilityLimits, TreeSpec
from specdecode_operator.planning.estimates import buckets_for
from specdecode_simulator.policies.operator_loop import DEEPEST
from specdecode_simulator.records.acceptance_walks import PLAIN, Form, Path, Records, chain, form_of, rounded
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.records.step_times import StepTable
from specdecode_simulator.traces.trace import Trace
from specdecode_simulator.world.fleet import Fleet
from specdecode_simulator.world.plan_pilot import PlanPilot
from specdecode_simulator.world.segment import Load, Outcome, Segment
from specdecode_simulator.world.truth import Truth
from specdecode_worker.contract import Buckets, Plan, PlanRow

HOUR_SECONDS = 3600.0
Pace = Callable[[Sequence[float], Sequence[int], int], float]
"""Tokens a second, by tokens and nodes of each part of a batch, and by passes."""
LIMITS, TREE = STABILITY["Medium"], TreeSpec()
_FIRST_CONTEXT = 400.0


class Part(NamedTuple):
    """``sequences`` that run the same shape."""

    sequences: float
    kinds: tuple[Text, ...]


class Text(NamedTuple):
    """Requests of one kind, and their share of a part."""

    domain: str
    quality: float
    share: float = 1.0


@dataclass(slots=True, eq=False)
class Shapes:
    """The best shapes for known acceptance, within bounds of trees. The latest answers are kept."""

    records: Records
    table: StepTable
    tree: TreeSpec
    deepest: int = DEEPEST

    @lru_cache(maxsize=20_000)
    def best(self, parts: tuple[Part, ...], kv_tokens: float) -> tuple[Form, ...]:
        """Shapes of most tokens a second: for each number of passes, nodes by falling survival, every prefix tried."""
        pace = self._pace(parts, kv_tokens)
        options = [(PLAIN,) * len(parts), *self._chains(parts, pace), *self._trees(parts, pace)]
        return max(options, key=lambda forms: self.pace(parts, forms, kv_tokens))

    def pace(self, parts: Sequence[Part], forms: Sequence[Form], kv_tokens: float) -> float:
        """Tokens a second, where every part runs its shape."""
        tokens = [1 + self.accepted(part, form) for part, form in zip(parts, forms, strict=True)]
        nodes, passes = [form.nodes for form in forms], max(form.depth for form in forms)
        return self._pace(parts, kv_tokens)(tokens, nodes, passes)

    def accepted(self, part: Part, form: Form) -> float:
        """Accepted tokens of a step."""
        return sum(text.share * self.records.mean_accepted(text.domain, text.quality, form) for text in part.kinds)

    def _chains(self, parts: Sequence[Part], pace: Pace) -> Iterator[tuple[Form, ...]]:
        gains = [[self.accepted(part, chain(depth)) for depth in range(self.deepest + 1)] for part in parts]
        nodes = sorted(
            (own[depth - 1] - own[depth], depth, index)
            for index, own in enumerate(gains)
            for depth in range(1, self.deepest + 1)
        )
        for passes in range(1, self.deepest + 1):
            depths, found = [0] * len(parts), list[tuple[float, tuple[int, ...]]]()
            tokens = [1 + own[0] for own in gains]
            for _, depth, index in nodes:
                if depth <= passes and depth == depths[index] + 1:
                    depths[index], tokens[index] = depth, 1 + gains[index][depth]
                    # The deepest level may not be reached by this prefix: then fewer passes are drafted.
                    found.append((pace(tokens, depths, max(depths)), tuple(depths)))
            yield tuple(map(chain, max(found)[1]))

    def _trees(self, parts: Sequence[Part], pace: Pace) -> Iterator[tuple[Form, ...]]:
        """The best trees by number of passes, by the survival of their nodes."""
        if self.tree.top_k == 1:
            return
        nodes = [(*node[:2], index, node[2]) for index, part in enumerate(parts) for node in self._likely(part.kinds)]
        nodes.sort(key=itemgetter(0, 1))
        for passes in range(1, self.deepest + 1):
            paths: list[list[Path]] = [[] for _ in parts]
            counts, tokens, most, deepest = [0] * len(parts), [1.0] * len(parts), 0.0, 0
            best = counts.copy()
            for survival, depth, index, path in nodes:
                if depth <= passes and counts[index] < self.tree.max_nodes:
                    paths[index].append(path)
                    counts[index], tokens[index] = counts[index] + 1, tokens[index] - survival
                    deepest = max(deepest, depth)
                    rate = pace(tokens, counts, deepest)
                    if rate > most:
                        best, most = counts.copy(), rate
            yield tuple(tree_of(frozenset(own[:count])) for own, count in zip(paths, best, strict=True))
            if deepest < passes:
                return  # No deeper node is among the likeliest either.

    @lru_cache(maxsize=1000)
    def _likely(self, kinds: tuple[Text, ...]) -> list[tuple[float, int, Path]]:
        """(-survival, depth, path) of nodes that may be in the best tree of these texts, level by level."""
        found, level = list[tuple[float, int, Path]](), list[Path]([()])
        for depth in range(1, self.deepest + 1):
            nodes = [
                (-sum(text.share * self.records.survival(*text[:2], path) for text in kinds), depth, path)
                for parent in level
                for path in ((*parent, rank) for rank in range(self.tree.top_k))
            ]
            best = sorted(nodes)[: self.tree.max_nodes]
            level = [path for _, _, path in best]
            found += best
        return found

    def _pace(self, parts: Sequence[Part], kv_tokens: float) -> Pace:
        """Return the tokens a second by the tokens and the nodes of each part, and by the passes."""
        weights = [part.sequences for part in parts]
        seconds = self.table.at_load(sum(weights), kv_tokens)

        def pace(tokens: Sequence[float], nodes: Sequence[int], passes: int) -> float:
            verify = sum([weight * (1 + count) for weight, count in zip(weights, nodes, strict=True)])
            emitted = sum([weight * count for weight, count in zip(weights, tokens, strict=True)])
            return emitted / seconds(verify, passes)

        return pace


@lru_cache(maxsize=4096)
def tree_of(paths: frozenset[Path]) -> Form:
    """Return the tree of these nodes."""
    order = sorted(paths, key=lambda path: (len(path), path))
    index = {(): 0, **{path: number for number, path in enumerate(order, start=1)}}
    return form_of(tuple(index[path[:-1]] for path in order))


def accepted_tokens(records: Records, domain: str, quality: float) -> tuple[float, ...]:
    """Return the expected accepted tokens of chains by depth."""
    return tuple(records.mean_accepted(domain, quality, chain(depth)) for depth in range(DEEPEST + 1))


@dataclass(slots=True)
class ClairvoyantPilot:
    trace: Trace
    truth: Truth
    shapes: Shapes

    def next(self, load: Load) -> Segment:
        """Choose the best shapes. Loads that differ by a few requests of many share one computed answer."""
        texts = (
            Text(self.trace.kinds[group.kind].domain, self.truth.quality(group.kind, load.now, group.context))
            for group in load.groups
        )
        parts = tuple(Part(_coarse(count), (text,)) for text, count in zip(texts, load.groups.values(), strict=True))
        context = 256.0 * max(0.25, round(load.kv_tokens / load.sequences / 256))
        forms = self.shapes.best(parts, context * sum(part.sequences for part in parts))
        return Segment(dict(zip(load.groups, forms, strict=True)), 32)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        pass


def _coarse(count: int) -> float:
    return float(count if count <= 4 else 2 * round(count / 2) if count <= 12 else 4 * round(count / 4))


@dataclass(slots=True)
class Clairvoyant:
    trace: Trace
    tree: TreeSpec = TREE

    def pilot(self, fleet: Fleet, index: int) -> ClairvoyantPilot:
        truth = fleet.truth(index)
        return ClairvoyantPilot(self.trace, truth, Shapes(truth.records, truth.table, self.tree))

    def poll(self, fleet: Fleet, now: float) -> int | None:
        return None


RowKey = tuple[int, int, str]
"""Buckets of concurrency and context, and the task."""


class Row(NamedTuple):
    form: Form
    moves: tuple[float, ...] = ()
    """When it did, of the last hour; that it was made is no move."""

    def may_move(self, now: float, limits: StabilityLimits) -> bool:
        recent = self._recent(now)
        rested = not recent or now - recent[-1] >= limits.min_dwell_seconds
        return rested and len(recent) < limits.max_changes_per_hour

    def moved(self, form: Form, now: float) -> Row:
        return Row(form, (*self._recent(now), now))

    def _recent(self, now: float) -> tuple[float, ...]:
        return tuple(at for at in self.moves if now - at < HOUR_SECONDS)


@dataclass(slots=True)
class Constrained:
    """Oracle that knows acceptance and cost. It plans other loads than the present one by their bucket's middle."""

    trace: Trace
    library: Library
    limits: StabilityLimits = LIMITS
    tree: TreeSpec = TREE
    plan: Plan = field(default_factory=lambda: Plan(uid="simulated"))
    _rows: dict[RowKey, Row] = field(default_factory=dict)
    _buckets: Buckets = field(default_factory=Buckets)
    _mix: dict[tuple[int, int], float] = field(default_factory=dict)
    _shapes: Shapes = field(init=False)

    def __post_init__(self) -> None:
        self._shapes = Shapes(self.library.records, self.library.tables[self.trace.table], self.tree)
        self._buckets = buckets_for(self.trace.limits.max_num_seqs)
        self.plan = Plan(uid="simulated", buckets=self._buckets, guard=False, explore=0)
        self._replan(0.0, 1.0, _FIRST_CONTEXT, {})

    @property
    def versions(self) -> int:
        """Changes of the first plan."""
        return self.plan.version - 1

    def pilot(self, fleet: Fleet, index: int) -> PlanPilot:
        return PlanPilot(self.trace.labels, self.plan, lambda sequences, passes: 0.0)

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
            self.plan = replace_plan(self.plan, rows)

    def _moves(
        self, now: float, concurrency: int, sequences: float, context: float, counts: Mapping[tuple[int, int], float]
    ) -> dict[RowKey, Row]:
        """The rows of one load that move, where all together pay."""
        labels, parts = self._parts(now, sequences, context, counts)
        names = [self.trace.labels[label] for label in labels]
        tokens = max(64.0, round(context / 64) * 64.0)
        known = [self._rows.get((concurrency, 0, name)) for name in names]
        kv = tokens * sum(part.sequences for part in parts)
        best = self._shapes.best(parts, kv)
        allowed = tuple(self._allowed(row, form, now) for row, form in zip(known, best, strict=True))
        if not self._pays(known, parts, allowed, kv):
            return {}
        return {
            (concurrency, bucket, name): row.moved(form, now) if row else Row(form)
            for name, form in zip(names, allowed, strict=True)
            for bucket in range(len(self._buckets.context) + 1)
            if (row := self._rows.get((concurrency, bucket, name))) is None or row.form != form
        }

    def _allowed(self, row: Row | None, wanted: Form, now: float) -> Form:
        """Within its dwell a row stays, but for speculation that loses."""
        moves = row is None or wanted == PLAIN or row.may_move(now, self.limits)
        return wanted if moves or row is None else row.form

    def _pays(
        self, known: Sequence[Row | None], parts: tuple[Part, ...], after: tuple[Form, ...], kv_tokens: float
    ) -> bool:
        """Return whether a move gains the least gain. Rows that do not exist yet are always made."""
        before = [row.form for row in known if row is not None]
        if len(before) < len(after):
            return True
        gain = self._shapes.pace(parts, after, kv_tokens) / self._shapes.pace(parts, before, kv_tokens) - 1
        return gain > 0 and gain >= self.limits.min_gain_percent / 100

    def _loads(self, running: float) -> Iterator[tuple[int, float]]:
        """(concurrency bucket, sequences): what runs where it is, else the middle of the bucket."""
        edges = self._buckets.concurrency
        for concurrency in range(len(edges) + 1):
            low = edges[concurrency - 1] if concurrency else 0
            high = edges[concurrency] if concurrency < len(edges) else self.trace.limits.max_num_seqs
            yield concurrency, running if low < running <= high else max(1.0, (low + 1 + high) / 2)

    def _parts(
        self, now: float, sequences: float, context: float, counts: Mapping[tuple[int, int], float]
    ) -> tuple[list[int], tuple[Part, ...]]:
        """The mix of labels, and what each may expect of the kinds that it holds."""
        kinds = self.trace.kinds
        mix: dict[tuple[int, int], float] = dict(counts)
        if not mix:
            for index, weight in enumerate(self.trace.mix(now)):
                mix[self.trace.labels.index(kinds[index].label), index] = max(weight, 1e-3)
        total = sum(mix.values())
        labels, bucket = sorted({label for label, _ in mix}), bisect_left(self._buckets.context, context)
        parts = []
        for label in labels:
            own = {kind: count for (which, kind), count in mix.items() if which == label}
            weight = sum(own.values())
            texts = tuple(self._text(kind, count / weight, now, bucket) for kind, count in sorted(own.items()))
            parts.append(Part(round(sequences * weight / total * 2) / 2 or 0.5, texts))
        return labels, tuple(parts)

    def _text(self, kind: int, share: float, now: float, context: int) -> Text:
        described = self.trace.kinds[kind]
        return Text(described.domain, rounded(described.quality_at(now, context)), round(share, 2))


def replace_plan(plan: Plan, rows: Mapping[RowKey, Row]) -> Plan:
    """The next version, with these rows."""
    made = tuple(
        PlanRow(concurrency=concurrency, context=context, task=task, shape=row.form.shape)
        for (concurrency, context, task), row in sorted(rows.items())
    )
    return plan.model_copy(update={"rows": made, "version": plan.version + 1})
