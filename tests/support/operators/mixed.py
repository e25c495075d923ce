"""A simulated worker whose batch has several tasks and whose shapes are trees; truth is known by task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdecode_worker.contract import (
    MAX_RANKS,
    AcceptanceCell,
    Plan,
    Report,
    TrafficCell,
    TreeShape,
)
from support.operators.fleet import Loop, SimulatedWorker, Truth, deployment_with

StepTime = Callable[[float, float, int], float]
"""Seconds of (sequences, verified tokens of all, draft passes)."""


def batch_time(sequences: float, verified: float, passes: int) -> float:
    """20 ms, 0.5 ms a draft pass, 0.4 ms a verified token."""
    return 0.020 + 0.0005 * passes + 0.0004 * verified


@dataclass
class TaskTruth:
    """Simulated load of one task, and the chance of each rank of the target's token, equal at all depths."""

    sequences: int
    ranks: list[float]


@dataclass
class MixedWorker(SimulatedWorker):
    """Worker that runs the row of each task; for a share of its steps all tasks run a chain of another depth."""

    tasks: dict[str, TaskTruth] = field(default_factory=dict)
    batch_time: StepTime = batch_time
    rank_counts: dict[tuple[str, int, str], list[int]] = field(default_factory=dict)
    output: dict[str, int] = field(default_factory=dict)

    def shape(self, task: str) -> TreeShape:
        sequences = sum(truth.sequences for truth in self.tasks.values())
        concurrency = sum(sequences > edge for edge in self.plan.buckets.concurrency)
        return self.planned_shape(concurrency, 0, task)

    def shapes(self) -> dict[str, TreeShape]:
        return {task: self.shape(task) for task in self.tasks}

    @property
    def depth(self) -> int:
        return max(shape.depth for shape in self.shapes().values())

    def run(self, seconds: float) -> None:
        end = self.clock + seconds
        while self.clock < end:
            if self.random.random() < self.explore / 4:
                self._rotation = (self._rotation + 1) % (max(self.plan.max_depth, 1) + 1)
                for _ in range(14):
                    self._batch(dict.fromkeys(self.tasks, TreeShape.chain(self._rotation)))
            else:
                self._batch(self.shapes())

    def report(self) -> Report:
        cells = tuple(
            AcceptanceCell(draft="d1", task=task, sampled=False, depth=depth, parent=parent, ranks=tuple(ranks))  # type: ignore[arg-type]
            for (task, depth, parent), ranks in self.rank_counts.items()
        )
        traffic = tuple(
            TrafficCell(
                task=task,
                arrivals=tokens // 100,
                finished=tokens // 100,
                prompt_tokens=tokens,
                cached_tokens=0,
                output_tokens=tokens,
            )
            for task, tokens in self.output.items()
        )
        report = super().report().model_copy(update={"acceptance": cells, "traffic": traffic, "requests": ()})
        return report.model_copy(update={"running": sum(truth.sequences for truth in self.tasks.values())})

    def _batch(self, shapes: dict[str, TreeShape]) -> None:
        sequences = sum(truth.sequences for truth in self.tasks.values())
        verified = sum(truth.sequences * (shapes[task].nodes + 1) for task, truth in self.tasks.items())
        passes = max(shape.depth for shape in shapes.values())
        seconds = self.batch_time(sequences, verified, passes) * (1 + self.random.gauss(0, self.truth.noise))
        emitted = 0
        for task, truth in self.tasks.items():
            for _ in range(truth.sequences):
                tokens = 1 + self._walk(task, truth, shapes[task])
                self.output[task] = self.output.get(task, 0) + tokens
                emitted += tokens
        self._count(sequences, verified, passes, seconds, emitted, bool(passes))

    def _walk(self, task: str, truth: TaskTruth, shape: TreeShape) -> int:
        """Return the accepted tokens of one draft.

        The rank of the target's token is counted wherever the parent was accepted. Beyond the depth of the shape, the
        main path is drafted in the shadow.
        """
        node, accepted, main, depth, inside = 0, 0, True, 0, True
        while depth < max(shape.depth, self.plan.max_depth) and (inside or main):
            depth += 1
            rank = self._rank(truth)
            cell = self.rank_counts.setdefault((task, depth, "main" if main else "sibling"), [0] * (MAX_RANKS + 1))
            cell[rank] += 1
            children = list(shape.children(node)) if inside else []
            inside = inside and rank < len(children)
            if inside:
                node, accepted = children[rank], accepted + 1
            main = main and rank == 0
        return accepted

    def _rank(self, truth: TaskTruth) -> int:
        drawn = self.random.random()
        for rank, chance in enumerate(truth.ranks):
            drawn -= chance
            if drawn < 0:
                return rank
        return MAX_RANKS

    def _count(self, sequences: int, verified: int, passes: int, seconds: float, emitted: int, drafting: bool) -> None:
        x = (1.0, sequences, verified, sequences * 500.0, passes, 0.0)
        xx = [x[i] * x[j] for i in range(6) for j in range(i, 6)]
        values = [1, seconds, seconds**2, emitted, *x, *(value * seconds for value in x), *xx]
        key = (1 << (verified - 1).bit_length(), passes, 0)
        known = self.steps.setdefault(key, [0.0] * len(values))
        self.steps[key] = [a + b for a, b in zip(known, values, strict=True)]
        self.clock += seconds
        counted = {
            "running_seconds": sequences * seconds,
            "drafts": sequences * drafting,
            "plain_steps": sequences * (not drafting),
            "draft_tokens": verified - sequences,
            "accepted_tokens": emitted - sequences,
        }
        for name, value in counted.items():
            self.counters[name] = self.counters.get(name, 0) + value


def mixed_loop(tasks: dict[str, TaskTruth], *, seed: int = 0, explore: float = 0.1, **spec: Any) -> Loop:
    """Return the pure loop over one such worker."""
    plan = Plan(initial=TreeShape.chain(3))
    worker = MixedWorker(Truth(noise=0.05), plan=plan, seed=seed, explore=explore, tasks=tasks)
    return Loop(deployment_with(**spec), worker)
