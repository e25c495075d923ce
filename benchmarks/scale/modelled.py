"""The report of a modelled worker: what it would have counted after so many seconds of work. Pure arithmetic."""

from __future__ import annotations

from typing import Any

from specdecode_worker.contract import FEATURES, MAX_RANKS

DRAFT = "modelled-draft"
TASKS = ("code", "other")
CHANCES = (0.75, 0.68, 0.6, 0.52, 0.45)
LOADS = (1, 2, 4, 8)
"""Sequences that ran together, each for as long as the others."""
DEPTHS = (0, 1, 2, 3, 5)
STEPS_PER_SECOND = 30.0
CONTEXT = 600.0
EDGES = tuple(0.001 * 2**power for power in range(18))


def counters(busy_seconds: float) -> dict[str, Any]:
    """All of a report that grows with work; equal seconds give equal counters."""
    cells = [_step_cell(load, depth, busy_seconds) for load in LOADS for depth in DEPTHS]
    sequence_steps = sum(cell["x"][1] for cell in cells)
    plain = sum(int(cell["x"][1]) for cell in cells if not cell["draft_passes"])
    drafts = int(sequence_steps) - plain
    return {
        "running_request_seconds": busy_seconds * sum(LOADS) / len(LOADS),
        "drafts": drafts,
        "draft_tokens": 3 * drafts,
        "accepted_tokens": int(1.6 * drafts),
        "plain_steps": plain,
        "acceptance": [_acceptance_cell(task, depth, drafts) for task in TASKS for depth in range(1, 6)],
        "requests": [_request_cell(task, drafts // 40) for task in TASKS],
        "steps": [cell for cell in cells if cell["count"]],
        "traffic": [_traffic_cell(task, drafts // 40) for task in TASKS],
        "latency": [_histogram(name, drafts) for name in ("ttft", "ttit", "e2e", "queue")],
    }


def _step_cell(load: int, depth: int, busy_seconds: float) -> dict[str, Any]:
    count = int(STEPS_PER_SECOND * busy_seconds / (len(LOADS) * len(DEPTHS)))
    packed = load * (depth + 1)
    seconds = 0.020 + 0.002 * depth + 0.0004 * packed
    x = (1.0, load, packed, load * CONTEXT, depth, 0.0)
    assert len(x) == len(FEATURES)
    emitted = load * (1 + sum(_survival(level) for level in range(1, depth + 1)))
    return {
        "tokens_bucket": 1 << (packed - 1).bit_length(),
        "draft_passes": depth,
        "prefill": False,
        "context_bucket": 0,
        "count": count,
        "x": [count * value for value in x],
        "xx": [count * x[i] * x[j] for i in range(len(x)) for j in range(i, len(x))],
        "xt": [count * value * seconds for value in x],
        "t": count * seconds,
        "tt": count * seconds**2 * 1.002,
        "device_seconds": count * seconds,
        "wall_seconds": count * seconds,
        "clipped": 0,
        "emitted": int(count * emitted),
    }


def _survival(depth: int) -> float:
    found = 1.0
    for chance in CHANCES[:depth]:
        found *= chance
    return found


def _acceptance_cell(task: str, depth: int, drafts: int) -> dict[str, Any]:
    reached = int(drafts / len(TASKS) * _survival(depth - 1))
    hits, second = int(reached * CHANCES[depth - 1]), reached // 20
    ranks = [hits, second, *[0] * (MAX_RANKS - 2), reached - hits - second]
    return {"draft": DRAFT, "task": task, "sampled": False, "depth": depth, "parent": "main", "ranks": ranks}


def _request_cell(task: str, n: int) -> dict[str, Any]:
    sums = {"n": n, "a": 24 * n, "d": 15 * n, "aa": 600 * n, "ad": 370 * n, "dd": 230 * n}
    return {"draft": DRAFT, "task": task, "sampled": False, **sums}


def _traffic_cell(task: str, n: int) -> dict[str, Any]:
    tokens = {"prompt_tokens": 200 * n, "cached_tokens": 50 * n, "output_tokens": 40 * n}
    return {"task": task, "arrivals": n, "finished": n, **tokens}


def _histogram(name: str, count: int) -> dict[str, Any]:
    counts = [count // 20] * (len(EDGES) + 1)
    return {"name": name, "edges": EDGES, "counts": counts, "sum": 0.02 * count}
