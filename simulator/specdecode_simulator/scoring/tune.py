"""Grids over what the baselines leave open, on traces that nothing is judged on, and seeds 0 to 9."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

from specdecode_simulator.policies.registry import SCALERS
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.scoring.run import Figures, one
from specdecode_simulator.traces.catalogue import named
from specdecode_simulator.traces.trace import Trace, knots, wave

SEEDS = tuple(range(10))
"""Tables of results are of other seeds, from 10 on."""
HOURS = 0.25
REPLICA_PRICE = 0.02
"""Share of missed requests that one more replica hour an hour is worth, where scaling rules are tuned."""

GRIDS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "vllm-table": {
        "edges": ((2, 6), (4, 12), (8, 24)),
        "depths": ((3, 2, 0), (3, 1, 0), (5, 3, 1), (4, 3, 2)),
    },
    "vllm-adaptive": {"drafted": (1, 2, 3, 5, 7)},
    "sglang": {"table": ("default", "shallow", "deep"), "alpha": (0.05, 0.2)},
    "trtllm": {"depth": (1, 2, 3), "window": (50, 500), "threshold": (0.3, 0.7)},
    "turbospec": {"alpha": (0.005, 0.02, 0.1), "interval": (16, 128)},
    "hpa-requests": {"target": (2.5, 5.0, 10.0, 15.0), "down_seconds": (300.0,)},
    "hpa-tokens": {"target": (500.0, 1000.0, 2000.0, 3000.0), "down_seconds": (300.0,)},
    "dynamo": {"interval": (60.0, 180.0), "correction": (True, False)},
    "wva": {"interval": (30.0, 60.0), "kv_spare": (0.1, 0.4), "queue_spare": (1.0, 3.0)},
}


def tuned(
    library: Library,
    report: Callable[[str], None] = lambda line: None,
    known: Mapping[str, float] = MappingProxyType({}),
    note: Callable[[str, float], None] = lambda key, cost: None,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, dict[str, Any]]:
    """The best point of every grid: least mean of time per token over the best point's of each trace; of scaling
    rules, least misses and replica hours together. Costs that are ``known``, by rule, point, trace and seed, are not
    computed again; the others are noted.
    """
    best = {}
    for name, grid in GRIDS.items():
        points = list(_points(grid))
        traces = list(tuning_traces(scaled=name in SCALERS))
        costs = [[0.0] * len(points) for _ in traces]
        for row, trace in zip(costs, traces, strict=True):
            for (index, point), seed in product(enumerate(points), seeds):
                key = json.dumps([name, point, trace.name, seed])
                cost = known[key] if key in known else _cost(name, point, trace, library, seed)
                if key not in known:
                    note(key, cost)
                row[index] += cost / len(seeds)
        totals = [sum(row[index] / max(min(row), 1e-9) for row in costs) for index in range(len(points))]
        best[name] = points[totals.index(min(totals))]
        report(f"{name}: {best[name]} of {len(points)}")
    return best


def tuning_traces(*, scaled: bool) -> Iterator[Trace]:
    """Yield traces of other forms and seeds than those that policies are judged on."""
    if scaled:
        base = named("diurnal", HOURS)
        yield replace(base, name="tune-hills", rate=wave(700.0, 0.5, 5.0))
        yield replace(base, name="tune-stairs", rate=knots(base.seconds, (0, 1), (0.3, 1), (0.31, 6), (0.7, 6), (1, 2)))
        return
    cpu, engine, gpu = (named(name, HOURS) for name in ("load-swings", "task-mix", "steady-gpu"))
    yield replace(cpu, name="tune-load", rate=knots(cpu.seconds, (0, 0.05), (0.5, 0.6), (1, 0.2)))
    yield replace(engine, name="tune-mix", mix=lambda t: (0.6, 0.4), rate=wave(600.0, 0.1, 0.6))
    drift = replace(gpu.kinds[0], quality=knots(gpu.seconds, (0, 0.5), (0.5, -0.2), (1, 0.3)))
    yield replace(gpu, name="tune-drift", kinds=(drift,), rate=lambda t: 0.7)


def _points(grid: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _cost(name: str, point: Mapping[str, Any], trace: Trace, library: Library, seed: int) -> float:
    figures = one(name, trace, library, seed, {name: point}, None).figures
    return _scaling_cost(figures, trace) if name in SCALERS else figures.time_per_token


def _scaling_cost(figures: Figures, trace: Trace) -> float:
    hours = trace.seconds / 3600
    return figures.slo_misses + REPLICA_PRICE * figures.replica_hours / hours
