"""A worker whose model is made up and whose decisions are the real ones: pilot, guard, exploration and counters."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from specdecode_worker.contract import OTHER_TASK, DraftState, PhaseSeconds, Plan, Report, TreeShape
from specdecode_worker.control.plan import Dispatcher
from specdecode_worker.core.request import ShapeSelector
from specdecode_worker.engine.stats import (
    AcceptanceCategory,
    Statistics,
    StepSize,
    build_report,
)
from support.operators.fleet import Loop, Truth, deployment_with

SORT = AcceptanceCategory(OTHER_TASK, False, "d1")
PREFILL_SECONDS = 0.05


class AlwaysReady:
    """Drafts that can propose for everyone."""

    merges = False

    def ready(self, request: object) -> bool:
        return True

    def extension(self, request: object) -> int:
        return 0


@dataclass
class PilotedWorker:
    """Steps of ``truth``; requests of ``answer`` tokens follow each other without a pause."""

    truth: Truth
    seed: int = 0
    answer: int = 64
    pass_seconds: float = 0.004
    clock: float = 0.0
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pilot = ShapeSelector(Dispatcher("u1", "d1", Plan(uid="u1", initial=TreeShape.chain(3))), AlwaysReady())
        request = SimpleNamespace(cached_bound=200, submit=SimpleNamespace(task=OTHER_TASK))
        self.requests: list[Any] = [request] * self.truth.sequences
        self.left = [self.answer] * self.truth.sequences

    @property
    def plan(self) -> Plan:
        return self.pilot.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.pilot.take_plan(plan)

    @property
    def depth(self) -> int:
        return self.plan.shape(sum(self.truth.sequences > edge for edge in self.plan.buckets.concurrency), 0).depth

    def run(self, seconds: float) -> None:
        end = self.clock + seconds
        while self.clock < end:
            self._step()

    def report(self) -> Report:
        self.statistics.running_request_seconds = self.truth.sequences * self.clock
        state = Report(
            boot_id="b",
            worker="w",
            model="m",
            target="t",
            max_num_seqs=4,
            draft=DraftState(method="eagle3", hash="d1"),
            named_drafts=(),
            clock_seconds=self.clock,
            running=self.truth.sequences,
            waiting=0,
            kv_tokens_total=4096,
            kv_tokens_used=400,
            kv_tokens_cached=0,
            plan=self.pilot.plan_state,
            synthetic=None,
            phases=PhaseSeconds(),
            guard=self.pilot.guard_cells(),
        )
        return build_report(state, self.statistics)

    def _step(self) -> None:
        prefill = min(self.left) <= 0
        selection = self.pilot.select(self.requests)
        trees, choice = selection.trees, selection.choice
        count = len(trees)
        emitted = 0
        for index, tree in enumerate(trees):
            tokens = 1 + self._walk(tree.depth, tree.drafted_depth)
            emitted += tokens
            self.left[index] = self.answer if self.left[index] <= 0 else self.left[index] - tokens
        passes = max(tree.drafted_depth for tree in trees)
        seconds = self.truth.step_time(count, max(tree.depth for tree in trees), 200.0)
        shadow = choice.shadow_passes * self.pass_seconds
        seconds = (seconds + shadow) * (1 + abs(self.random.gauss(0, self.truth.noise))) + PREFILL_SECONDS * prefill
        self.clock += seconds
        size = StepSize(
            sequences=count,
            verify_tokens=sum(tree.verified for tree in trees),
            kv_tokens=200 * count,
            draft_passes=passes,
            prefill_tokens=40 * prefill,
        )
        if choice.counted or prefill:
            self.statistics.costs.add(choice.context, size, emitted, seconds, seconds)
        if not prefill:
            self.pilot.record_step(choice, seconds, emitted / count, shadow)

    def _walk(self, verified: int, drafted: int) -> int:
        """Return the accepted tokens; what was drafted beyond is scored in the shadow."""
        accepted, level = 0, 0
        while level < drafted:
            hit = self.random.random() < self.truth.chances[level]
            level += 1
            self.statistics.record_rank(SORT, level, main=True, rank=0 if hit else 8)
            if not hit:
                break
            accepted += level <= verified
        self.statistics.record_draft(verified, accepted)
        return accepted


def piloted_loop(truth: Truth, *, seed: int = 0, pass_seconds: float = 0.004, **speculation: Any) -> Loop:
    """Return the whole loop, with the worker's own half of it."""
    worker = PilotedWorker(truth, seed=seed, pass_seconds=pass_seconds)
    deployment = deployment_with(engine={"maxNumSeqs": 4}, speculation=speculation)
    return Loop(deployment, worker)  # type: ignore[arg-type]
