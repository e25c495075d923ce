"""All running tasks at one load, and the shapes that are best for them together.

The time of a step depends on the whole batch, so shapes are chosen jointly: for each number of
draft passes the nodes of all tasks stand in one order, by survival, and every prefix of it is a candidate. That is
exact, because a step's time depends on how many nodes there are and not on which, and no node is likelier than its
parent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from specdecode_operator.planning.bounds import Bounds
from specdecode_operator.planning.loads import Load
from specdecode_operator.planning.promise import Promise
from specdecode_operator.planning.steptime import StepTimes
from specdecode_operator.planning.trees import Node, Path, Rates, best_nodes, chain_of, expected, paths_of, shape_of
from specdecode_worker.contract import TreeShape

Shapes = tuple[tuple[str, TreeShape], ...]
"""The shape of every task, in the order of the situation's tasks."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task at one load. ``share`` is of the running sequences while the rows run what they do, ``demand`` of the
    tokens that are asked for, whatever runs; each sums to 1 over the tasks. ``requests`` is of how many its rates are
    known."""

    name: str
    bounds: Bounds
    rates: Rates
    share: float
    demand: float
    requests: float = math.inf
    held: TreeShape | None = None
    """The one shape that may run, whatever the bounds: the others are chosen around it."""

    @property
    def least_depth(self) -> int:
        return self.bounds.least if self.held is None else self.held.depth

    @property
    def most_depth(self) -> int:
        return self.bounds.most if self.held is None else self.held.depth

    @property
    def asked(self) -> TreeShape:
        """What runs at the least."""
        return chain_of(self.bounds.least) if self.held is None else self.held


@dataclass(frozen=True, slots=True)
class Situation:
    """Where a choice is made."""

    times: StepTimes
    load: Load
    context: int
    tasks: tuple[Task, ...]
    promise: Promise
    requests: float = math.inf
    """How many say what the demand is."""

    def with_only(self, free: Collection[str], now: Mapping[str, TreeShape]) -> Situation:
        """The same with every other task held to its shape."""
        tasks = (task if task.name in free else replace(task, held=now[task.name]) for task in self.tasks)
        return replace(self, tasks=tuple(tasks))

    def plain(self) -> Shapes:
        """No drafts, or as few as the bounds allow."""
        return tuple((task.name, task.asked) for task in self.tasks)

    def best(self) -> Iterator[Shapes]:
        """For each number of draft passes the best shapes that need just so many; the fewest passes first."""
        fewest = max(task.least_depth for task in self.tasks)
        most = max(task.most_depth for task in self.tasks)
        for passes in range(fewest, max(fewest, most) + 1):
            found = self._best_of(passes)
            if found is not None:
                yield found

    def _best_of(self, passes: int) -> Shapes | None:
        """The best prefix of all nodes by survival among those that are ``passes`` deep."""
        curve = self.times.curve(self.load, passes, self.context)
        growth = _Growth.start(self.tasks)
        best: tuple[tuple[float, float], dict[str, int]] | None = None
        for step in (None, *self._by_survival(passes)):
            if step is not None:
                growth.add(*step)
            if growth.depth == passes:
                seconds = curve.mean(growth.verified)
                rank = self.promise.violation(seconds, growth.tokens.values()), seconds / growth.mean_tokens
                if best is None or rank < best[0]:
                    best = rank, growth.counts()
        if best is None:
            return None
        return tuple((task.name, shape_of(growth.paths[task.name][: best[1][task.name]])) for task in self.tasks)

    def _by_survival(self, passes: int) -> list[tuple[Task, Node]]:
        """Nodes that the bounds allow beyond those that they ask for, of all tasks, likeliest first."""
        found: list[tuple[Task, Node]] = []
        for task in self.tasks:
            bounds = task.bounds
            if task.held is None:
                depth = min(passes, bounds.most)
                nodes = best_nodes(task.rates, depth=depth, top_k=bounds.top_k, most=bounds.max_nodes)
                asked = set(paths_of(task.asked))
                more = [node for node in nodes if node.path not in asked]
                found += [(task, node) for node in more[: bounds.max_nodes - bounds.least]]
        return sorted(found, key=lambda step: (step[1].order, step[0].name))


@dataclass(slots=True)
class _Growth:
    """Trees of all tasks while they grow node by node."""

    tasks: tuple[Task, ...]
    paths: dict[str, list[Path]]
    tokens: dict[str, float]
    verified: float
    mean_tokens: float
    depth: int

    @classmethod
    def start(cls, tasks: tuple[Task, ...]) -> _Growth:
        tokens = {task.name: expected(task.rates, task.asked) for task in tasks}
        return cls(
            tasks,
            {task.name: list(paths_of(task.asked)) for task in tasks},
            tokens,
            1 + sum(task.share * task.asked.nodes for task in tasks),
            sum(task.share * tokens[task.name] for task in tasks),
            max(task.least_depth for task in tasks),
        )

    def add(self, task: Task, node: Node) -> None:
        self.paths[task.name].append(node.path)
        self.tokens[task.name] += node.survival
        self.verified += task.share
        self.mean_tokens += task.share * node.survival
        self.depth = max(self.depth, len(node.path))

    def counts(self) -> dict[str, int]:
        return {name: len(paths) for name, paths in self.paths.items()}
