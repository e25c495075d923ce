"""Time of every kernel in a step, by torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import Bench
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from specdecode_worker.contract import TreeShape
from stages import Run

Row = dict[str, Any]
STEPS = 24
KERNELS = 30
"""Rows of a shape: the kernels that take the longest."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Time and launches of a kernel over all profiled steps."""

    name: str
    microseconds: float
    launches: int


def parse(shape: str) -> TreeShape:
    return TreeShape(()) if shape == "plain" else TreeShape.parse(shape)


def profile_shape(bench: Bench, batch: int, shape: str, context: int, run: Run) -> Iterator[Row]:
    """Yield the kernels of a step, those that take the longest first."""
    steps = 3 if run.dry else STEPS
    bench.run_shape(parse(shape))
    bench.accept_as(None)
    bench.begin(batch, context)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            bench.engine.step()
        torch.cuda.synchronize()
    bench.end(batch)
    found = kernels_of(profiled.key_averages(), DeviceType.CPU if run.dry else DeviceType.CUDA)
    common = {"batch": batch, "shape": shape, "context": context}
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
