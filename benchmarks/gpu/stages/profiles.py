"""Time of every kernel in a step, by torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from given import Run
from harness import Bench, build
from shapes import LLAMA_8B
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from stages.steps import Wanted, asked_of, parse, steps_of

Row = dict[str, Any]
KERNELS = 30
"""Rows of a shape: the kernels that take the longest."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Time and launches of a kernel over all profiled steps."""

    name: str
    microseconds: float
    launches: int


def profile_steps(run: Run) -> Iterator[Row]:
    """Plain and a chain of 5, one text of 8k and then 16."""
    wanted = Wanted(shapes=("plain", "chain:5"), batches=(16, 1))
    bench = build(asked_of(run, LLAMA_8B, wanted))
    for batch in sorted(bench.batches):
        for shape in wanted.shapes:
            yield from _of_shape(bench, batch, shape, run)


def _of_shape(bench: Bench, batch: int, shape: str, run: Run) -> Iterator[Row]:
    steps = steps_of(run)
    bench.run_shape(parse(shape))
    bench.accept_as(None)
    bench.begin(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            bench.engine.step()
        torch.cuda.synchronize()
    bench.end(batch)
    found = kernels_of(profiled.key_averages(), DeviceType.CPU if run.dry else DeviceType.CUDA)
    common = {"batch": batch, "shape": shape, "context": bench.context}
    busy, launches = sum(one.microseconds for one in found), sum(one.launches for one in found)
    yield {
        "kind": "kernels",
        **common,
        "busy_microseconds": busy / steps,
        "launches": launches / steps,
        "names": len(found),
    }
    for one in found[:KERNELS]:
        yield {
            "kind": "kernel",
            **common,
            "name": one.name[:120],
            "microseconds": one.microseconds / steps,
            "launches": one.launches / steps,
            "share": one.microseconds / busy,
        }


def kernels_of(events: Sequence[Any], device: DeviceType) -> list[Kernel]:
    """The kernels among the profiler's averages, the longest first. Operations of the host that launched them are left
    out, because their device time is that of the kernels once more."""
    found = []
    for event in events:
        if event.device_type == device:
            took = event.self_cpu_time_total if device == DeviceType.CPU else event.self_device_time_total
            found.append(Kernel(event.key, float(took), int(event.count)))
    return sorted(found, key=lambda one: -one.microseconds)
