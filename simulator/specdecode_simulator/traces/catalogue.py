"""The traces by name. Rates suit the tables: at a rate of 1 a worker of the CPU table is about half busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specdecode_simulator.traces.job import Limits
from specdecode_simulator.traces.trace import Curve, Kind, Trace, flat, knots, square, wave

CPU, BUSY, GPU, SLOW_GPU, ENGINE = "smollm2-cpu", "smollm2-cpu-busy", "h200-8b", "l40s-8b", "plain-engine-8b"
SCOUT, MAVERICK = "h200-scout", "8-h200-maverick"
DWELL_SECONDS = 60.0
_CPU_LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=512, kv_tokens=32768)
_GPU_LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=2048, kv_tokens=400_000)
Make = Callable[[float], Trace]

TRACES: dict[str, Make] = {}


def trace(make: Make) -> Make:
    """Enters a trace by its function's name. Its argument is the length in seconds."""
    TRACES[make.__name__.replace("_", "-")] = make
    return make


def named(name: str, hours: float) -> Trace:
    return TRACES[name](3600.0 * hours)


def _cpu(name: str, seconds: float, rate: float = 0.12, **fields: Any) -> Trace:
    kinds = fields.pop("kinds", (Kind(domain="qa", prompt=64, output=96),))
    given: dict[str, Any] = {"family": "shifting", "ttft_seconds": 5.0, "ttit_seconds": 0.12, **fields}
    curve = given.pop("curve", flat(rate))
    return Trace(name=name, seconds=seconds, table=CPU, kinds=kinds, rate=curve, limits=_CPU_LIMITS, **given)


def _gpu(name: str, seconds: float, rate: float = 2.0, **fields: Any) -> Trace:
    kinds = fields.pop("kinds", (_chat(),))
    given: dict[str, Any] = {"family": "shifting", "ttft_seconds": 1.0, "ttit_seconds": 0.015, **fields}
    curve, table = given.pop("curve", flat(rate)), given.pop("table", GPU)
    limits = given.pop("limits", _GPU_LIMITS)
    return Trace(name=name, seconds=seconds, table=table, kinds=kinds, rate=curve, limits=limits, **given)


def _curve(value: float | Curve) -> Curve:
    return flat(value) if isinstance(value, float) else value


def _chat(quality: float | Curve = 0.45, **fields: Any) -> Kind:
    """A head for an 8B model accepts more than ours: 2.8 tokens a step with a chain of 3."""
    return Kind(**{"domain": "qa", "quality": _curve(quality), "prompt": 600, "output": 1500, **fields})


def _code(quality: float | Curve = 0.55, **fields: Any) -> Kind:
    return Kind(
        **{"domain": "code", "label": "code", "quality": _curve(quality), "prompt": 900, "output": 1000, **fields}
    )


def _prose(quality: float | Curve = -0.3, **fields: Any) -> Kind:
    return Kind(
        **{"domain": "prose", "label": "prose", "quality": _curve(quality), "prompt": 300, "output": 1600, **fields}
    )


# --- stationary -----------------------------------------------------------------------------------------------------


@trace
def steady_cpu_quiet(seconds: float) -> Trace:
    return _cpu("steady-cpu-quiet", seconds, 0.12, family="stationary")


@trace
def steady_cpu_full(seconds: float) -> Trace:
    return _cpu("steady-cpu-full", seconds, 0.6, family="stationary")


@trace
def steady_noisy_neighbour(seconds: float) -> Trace:
    quiet = _cpu("steady-noisy-neighbour", seconds, 0.12, family="stationary")
    return replace(quiet, table=BUSY)


@trace
def steady_gpu(seconds: float) -> Trace:
    return _gpu("steady-gpu", seconds, 1.2, family="stationary")


@trace
def steady_gpu_tasks(seconds: float) -> Trace:
    return _gpu(
        "steady-gpu-tasks",
        seconds,
        0.4,
        family="stationary",
        table=ENGINE,
        kinds=(_code(), _prose()),
        mix=lambda t: (0.5, 0.5),
    )


# --- shifting -------------------------------------------------------------------------------------------------------


@trace
def acceptance_step(seconds: float) -> Trace:
    """Every 20 minutes acceptance moves by about 0.3, for better and for worse."""
    period = 2400.0
    steps = tuple(float(t) for t in range(1200, int(seconds), 1200))
    return _cpu(
        "acceptance-step",
        seconds,
        0.15,
        kinds=(Kind(domain="qa", quality=square(period, 0.6, 0.0), prompt=64, output=96),),
        steps_at=steps,
    )


@trace
def acceptance_drift(seconds: float) -> Trace:
    """A draft that goes stale over the hours, and is replaced by its twin of old at the end."""
    quality = knots(seconds, (0, 0.55), (0.85, -0.5), (0.851, 0.55), (1, 0.55))
    return _gpu("acceptance-drift", seconds, 0.5, table=ENGINE, kinds=(_chat(quality),))


@trace
def dwell_flips(seconds: float) -> Trace:
    """Shifts exactly as long as the dwell: whoever follows each of them is always late."""
    quality = square(2 * DWELL_SECONDS, 0.6, -0.4)
    return _cpu("dwell-flips", seconds, 0.15, kinds=(Kind(domain="qa", quality=quality, prompt=64, output=64),))


@trace
def task_mix(seconds: float) -> Trace:
    """From nearly all code to nearly all prose and back, by the half hour."""
    share = square(3600.0, 0.9, 0.1)
    return _gpu(
        "task-mix",
        seconds,
        0.4,
        table=ENGINE,
        kinds=(_code(), _prose()),
        mix=lambda t: (share(t), 1 - share(t)),
    )


@trace
def load_with_task(seconds: float) -> Trace:
    """Office hours bring code and load, the night prose and none."""
    day = wave(seconds / 2, 0.0, 1.0)
    return _gpu(
        "load-with-task",
        seconds,
        table=ENGINE,
        curve=lambda t: 0.1 + 0.7 * day(t),
        kinds=(_code(), _prose()),
        mix=lambda t: (0.1 + 0.8 * day(t), 0.9 - 0.8 * day(t)),
    )


@trace
def mislabelled(seconds: float) -> Trace:
    """A third of the prose comes labelled as code, and the other way round."""
    return _gpu(
        "mislabelled",
        seconds,
        0.4,
        table=ENGINE,
        kinds=(_code(mislabelled=0.33), _prose(mislabelled=0.33)),
        mix=lambda t: (0.5, 0.5),
    )


@trace
def load_swings(seconds: float) -> Trace:
    """One worker between idle and full: the right depth falls with load and rises again."""
    return _cpu("load-swings", seconds, curve=wave(3600.0, 0.03, 0.75))


@trace
def context_growth(seconds: float) -> Trace:
    """Conversations grow from 1k to 12k tokens."""
    growth = knots(seconds, (0, 1.0), (0.9, 12.0), (1, 12.0))
    kind = _chat(prompt=1000, output=1000, spread=0.3, prompt_growth=growth)
    return _gpu("context-growth", seconds, 0.8, kinds=(kind,))


@trace
def untrained_lengths(seconds: float) -> Trace:
    """A third of the requests are long; the draft was trained on short ones, and knows little of the others."""
    short = _chat(prompt=300, output=500, spread=0.3)
    long = _chat(prompt=12000, output=700, spread=0.2, beyond=(0.0, -0.5, -1.6))
    return _gpu("untrained-lengths", seconds, 0.15, table=ENGINE, kinds=(short, long), mix=lambda t: (2 / 3, 1 / 3))


@trace
def prompt_bound(seconds: float) -> Trace:
    """Long prompts, short answers: most of the time is prefill."""
    return _gpu("prompt-bound", seconds, 1.6, kinds=(_chat(prompt=6000, output=60),))


@trace
def kv_bound(seconds: float) -> Trace:
    """Not slots but KV tokens are what runs out."""
    limits = Limits(max_num_seqs=32, max_num_batched_tokens=2048, kv_tokens=40_000)
    return _gpu("kv-bound", seconds, 0.8, limits=limits, kinds=(_chat(prompt=4000, output=1500, spread=0.3),))


@trace
def heavy_tail(seconds: float) -> Trace:
    """A few answers are as long as all the others together."""
    return _gpu("heavy-tail", seconds, 0.9, kinds=(_chat(spread=1.4),))


# --- faults ---------------------------------------------------------------------------------------------------------


@trace
def slow_pod(seconds: float) -> Trace:
    """One of three pods takes 1.8 times as long for an hour."""
    return _gpu(
        "slow-pod",
        seconds,
        2.4,
        family="fault",
        replicas=3,
        most_replicas=3,
        factor=lambda pod, t: 1.8 if pod == 1 and 0.25 * seconds < t < 0.5 * seconds else 1.0,
    )


@trace
def mixed_gpus(seconds: float) -> Trace:
    """Two fast devices and a slow one behind one Service."""
    return _gpu(
        "mixed-gpus",
        seconds,
        1.0,
        family="fault",
        replicas=3,
        most_replicas=3,
        tables=lambda pod: SLOW_GPU if pod == 2 else None,
    )


@trace
def lost_reports(seconds: float) -> Trace:
    """Three reports of ten never arrive, and acceptance steps meanwhile."""
    kind = Kind(domain="qa", quality=square(2400.0, 0.6, 0.0), prompt=64, output=96)
    return _cpu("lost-reports", seconds, 0.15, family="fault", kinds=(kind,), lost=lambda pod, t: 0.3)


@trace
def operator_away(seconds: float) -> Trace:
    """The operator is gone for ten minutes of every forty, over a step of acceptance."""
    kind = Kind(domain="qa", quality=square(2400.0, 0.6, 0.0), prompt=64, output=96)
    return _cpu("operator-away", seconds, 0.15, family="fault", kinds=(kind,), away=lambda t: 900 <= t % 2400 < 1500)


# --- scaling --------------------------------------------------------------------------------------------------------


def _scaled(name: str, seconds: float, curve: Callable[[float], float], **fields: Any) -> Trace:
    return _gpu(name, seconds, curve=curve, family="scaling", replicas=1, most_replicas=6, **fields)


@trace
def diurnal(seconds: float) -> Trace:
    return _scaled("diurnal", seconds, wave(seconds / 2, 0.3, 8.0))


@trace
def burst(seconds: float) -> Trace:
    """Five minutes of four times the load, every forty."""
    return _scaled("burst", seconds, square(2400.0, 1.5, 6.0, share=0.125))


@trace
def ramp(seconds: float) -> Trace:
    return _scaled("ramp", seconds, knots(seconds, (0, 0.3), (0.7, 9.0), (0.71, 2.0), (1, 2.0)))


@trace
def retry_storm(seconds: float) -> Trace:
    """Clients that wait too long ask again: a burst that is not served grows by itself."""
    return _scaled("retry-storm", seconds, square(3600.0, 2.0, 9.0, share=0.1), patience_seconds=8.0)


@trace
def no_capacity(seconds: float) -> Trace:
    """The cluster has room for two pods while four are needed."""
    room = knots(seconds, (0, 6), (0.3, 6), (0.301, 2), (0.7, 2), (0.701, 6), (1, 6))
    return _scaled("no-capacity", seconds, wave(seconds / 2, 0.5, 6.0), capacity=room)


# --- experts --------------------------------------------------------------------------------------------------------


@trace
def scout_swings(seconds: float) -> Trace:
    """Return the trace of Scout, whose 16 experts are all read by large batches, so that a node costs less at load."""
    return _gpu("scout-swings", seconds, table=SCOUT, curve=wave(3600.0, 0.02, 0.7), ttit_seconds=0.05)


@trace
def maverick_swings(seconds: float) -> Trace:
    """Return the trace of Maverick, where each token reads other experts of 128 at every load that fits."""
    return _gpu("maverick-swings", seconds, table=MAVERICK, curve=wave(3600.0, 0.05, 1.5), ttit_seconds=0.03)


OF_RECORD = tuple(name for name in TRACES if name not in ("untrained-lengths", "scout-swings", "maverick-swings"))
"""Traces that the figures of record are of. The oracles have one row for all contexts, so none is fair to the first of
the others; the step times of the last are computed alone."""
