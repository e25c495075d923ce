"""Rules that other engines have inside: depth from batch size, acceptance or goodput, without an operator.

Rules after public documentation of vLLM (dynamic speculative decoding by batch size; adaptive verification), SGLang
(adaptive speculative decoding), TensorRT-LLM (acceptance window and threshold, one way) and TurboSpec's paper
(arXiv 2406.14066); written for this simulator. One instance a worker. None sees tasks; what is profiled offline
is the table of a quiet machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specdecode_simulator.records.acceptance_walks import Form, chain
from specdecode_simulator.records.step_times import StepTable
from specdecode_simulator.world.segment import Group, Load, Outcome, Segment

DEEPEST = 7
SEGMENT_STEPS = 32


@dataclass(slots=True)
class Fixed:
    """The same depth whatever happens."""

    depth: int

    def next(self, load: Load) -> Segment:
        return Segment(dict.fromkeys(load.groups, chain(self.depth)))

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        pass


@dataclass(slots=True)
class BatchTable:
    """vLLM: depth by the number of running sequences. ``edges`` are upper and inclusive; beyond the last the last."""

    edges: tuple[int, ...]
    depths: tuple[int, ...]

    def next(self, load: Load) -> Segment:
        at = sum(load.sequences > edge for edge in self.edges)
        return Segment(dict.fromkeys(load.groups, chain(self.depths[at])), SEGMENT_STEPS)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        pass


@dataclass(slots=True)
class AdaptiveVerification:
    """vLLM: drafts ``drafted`` tokens always, then verifies as many as bring most tokens a second.

    The budget comes from cost curves profiled at start; confidence is smoothed (``alpha``). Here a request's
    confidence is its group's measured survival: a real confidence head knows more of the single token.
    """

    table: StepTable
    drafted: int
    alpha: float
    _survival: dict[Group, list[float]] = field(default_factory=dict)

    def next(self, load: Load) -> Segment:
        depths = dict.fromkeys(load.groups, 0)
        nodes = sorted(
            ((-self._known(group)[level], level, group) for group in load.groups for level in range(self.drafted)),
            key=lambda node: (node[0], node[1], node[2]),
        )
        best, pace = dict(depths), self._pace(load, depths)
        for _, level, group in nodes:
            depths[group] = level + 1
            rate = self._pace(load, depths)
            if rate > pace:
                best, pace = dict(depths), rate
        return Segment({group: chain(best[group]) for group in load.groups}, SEGMENT_STEPS, drafted_depth=self.drafted)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        """Learn survival by depth. Beyond the verified depth it is the draft's confidence, taken as calibrated."""
        for group, sums in outcome.runs.items():
            steps = max(1.0, load.groups[group] * outcome.steps)
            weight = self.alpha ** min(outcome.steps, 8)
            known = self._known(group)
            fresh = [min(1.0, float(sums[level]) / steps) for level in range(self.drafted)]
            self._survival[group] = [weight * a + (1 - weight) * b for a, b in zip(known, fresh, strict=True)]

    def _known(self, group: Group) -> list[float]:
        return self._survival.get(group) or [0.7**level for level in range(1, self.drafted + 1)]

    def _pace(self, load: Load, depths: dict[Group, int]) -> float:
        verify = sum(count * (depths[group] + 1) for group, count in load.groups.items())
        tokens = sum(count * (1 + sum(self._known(group)[: depths[group]])) for group, count in load.groups.items())
        return tokens / self.table.seconds(load.sequences, verify, self.drafted, load.kv_tokens)


@dataclass(slots=True)
class Tiers:
    """SGLang: a moving average of accepted tokens picks a tier, one step up or down at a time, with hysteresis."""

    tiers: tuple[int, ...]
    alpha: float
    interval: int = 5
    warmup: int = 10
    down: float = -0.25
    up: float = 0.0
    _average: float | None = None
    _batches: int = 0
    _since: int = 0
    _at: int = 0

    def __post_init__(self) -> None:
        self._at = len(self.tiers) // 2

    def next(self, load: Load) -> Segment:
        return Segment(dict.fromkeys(load.groups, chain(self.tiers[self._at])), max(self.interval, SEGMENT_STEPS // 2))

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        steps = max(1.0, outcome.sequences * outcome.steps)
        accepted = sum(float(sums[8]) for sums in outcome.runs.values()) / steps
        weight = (1 - self.alpha) ** outcome.steps
        self._average = accepted if self._average is None else weight * self._average + (1 - weight) * accepted
        self._batches += outcome.steps
        self._since += outcome.steps
        if self._batches >= self.warmup and self._since >= self.interval:
            self._since = 0
            self._move(self._average)

    def _move(self, average: float) -> None:
        """Up when nearly all of this tier is accepted, down when the tier below would have held what is accepted."""
        if self._at + 1 < len(self.tiers) and average > self.tiers[self._at] - 0.5 + self.up:
            self._at += 1
        elif self._at > 0 and average < self.tiers[self._at - 1] - 0.5 + self.down:
            self._at -= 1


@dataclass(slots=True)
class OneWayGate:
    """TensorRT-LLM: speculation ends for good once the mean acceptance of a window of requests is below a threshold."""

    depth: int
    window: int
    threshold: float
    """Accepted tokens of a draft, beyond the target's own."""
    _recent: deque[float] = field(default_factory=deque)
    _closed: bool = False
    _steps: float = 0.0

    def next(self, load: Load) -> Segment:
        return Segment(dict.fromkeys(load.groups, chain(0 if self._closed else self.depth)), SEGMENT_STEPS)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        if self._closed:
            return
        steps = max(1.0, outcome.sequences * outcome.steps)
        self._recent.append(sum(float(sums[8]) for sums in outcome.runs.values()) / steps)
        if len(self._recent) > self.window:
            self._recent.popleft()
            self._closed = sum(self._recent) / len(self._recent) < self.threshold


@dataclass(slots=True)
class Goodput:
    """TurboSpec: the depth of most goodput by a step time fitted offline and a moving average of acceptance.

    One acceptance rate for all depths and requests; tokens are those of a geometric chain.
    """

    fit: Callable[[float, float, float, float], float]
    """Seconds by (sequences, verified tokens, passes, KV tokens)."""
    alpha: float
    interval: int
    _rate: float = 0.7
    _depth: int = 3
    _since: int = 10**9

    def next(self, load: Load) -> Segment:
        if self._since >= self.interval:
            self._since = 0
            self._depth = max(range(DEEPEST + 1), key=lambda depth: self._goodput(load, depth))
        # Runs are counted along the record at depth 0 too: a real engine would have to try a token now and then.
        form: Form = chain(self._depth)
        return Segment(dict.fromkeys(load.groups, form), SEGMENT_STEPS)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        self._since += outcome.steps
        steps = max(1.0, outcome.sequences * outcome.steps)
        reached = hits = 0.0
        depth = max(self._depth, 1)
        for sums in outcome.runs.values():
            hits += float(sums[:depth].sum())
            reached += float(sums[: depth - 1].sum())
        reached += steps
        weight = (1 - self.alpha) ** outcome.steps
        self._rate = weight * self._rate + (1 - weight) * min(0.99, hits / reached)

    def _goodput(self, load: Load, depth: int) -> float:
        tokens = sum(self._rate**level for level in range(depth + 1))
        verify = load.sequences * (depth + 1)
        return tokens / max(1e-9, self.fit(load.sequences, verify, depth, load.kv_tokens))
