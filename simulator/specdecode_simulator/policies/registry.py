"""Policies by name, with what was tuned for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode_operator.api.v1alpha1 import TreeSpec
from specdecode_simulator.policies.engine_rules import (
    AdaptiveVerification,
    BatchTable,
    Fixed,
    Goodput,
    OneWayGate,
    StepTiers,
)
from specdecode_simulator.policies.operator_loop import DEEPEST, Ours
from specdecode_simulator.policies.oracle import Clairvoyant, Constrained, accepted_tokens
from specdecode_simulator.policies.scalers import Hpa, OutputTokens, Saturation, Scaled, Throughput, requests
from specdecode_simulator.policies.upstream_rules import SGLANG_DEFAULT, StepCandidates
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.records.step_times import StepTable
from specdecode_simulator.traces.trace import Trace
from specdecode_simulator.world.fleet import Controller, Fleet
from specdecode_simulator.world.segment import Pilot

Tuned = Mapping[str, Mapping[str, Any]]
FIXED = tuple(f"fixed-{depth}" for depth in range(DEEPEST + 1))
ENGINES = ("vllm-table", "vllm-adaptive", "sglang", "trtllm", "turbospec")
ORACLES = ("clairvoyant", "constrained")
SCALERS = ("hpa-requests", "hpa-tokens", "dynamo", "wva")
DEPTH_POLICIES = (*FIXED, *ENGINES)
OURS = ("ours", "ours-chains")
"""The operator, and the operator without trees."""
CHAINS = {"tree": {"topK": 1}}
ALL = (*OURS, *DEPTH_POLICIES, *SCALERS, *ORACLES)


def judged_on(family: str) -> tuple[str, ...]:
    """Return the default policies of a family of traces: rules of scaling on scaled ones, of depth on the others."""
    return (*(("ours", *SCALERS) if family == "scaling" else (*OURS, *DEPTH_POLICIES)), *ORACLES)


SGLANG_TABLES: Mapping[str, Mapping[int, StepCandidates]] = {
    "default": SGLANG_DEFAULT,
    "shallow": {1: StepCandidates((0, 1, 2, 3), down=-0.25), 4: StepCandidates((0, 1, 2)), 16: StepCandidates((0, 1))},
    "deep": {1: StepCandidates((1, 3, 5, 7), down=-0.25), 16: StepCandidates((0, 1, 3, 5)), 64: StepCandidates((0, 1))},
}
"""SGLang's own table of passes by batch size, and two for devices where drafts are dearer or cheaper."""
DEFAULTS: Tuned = {
    "vllm-table": {"edges": (4, 16), "depths": (3, 2, 0)},
    "vllm-adaptive": {"drafted": 5},
    "sglang": {"table": "default", "alpha": 0.2},
    "trtllm": {"depth": 3, "window": 50, "threshold": 0.5},
    "turbospec": {"alpha": 0.05, "interval": 16},
    "hpa-requests": {"target": 12.0, "down_seconds": 300.0},
    "hpa-tokens": {"target": 1500.0, "down_seconds": 300.0},
    "dynamo": {"interval": 180.0, "correction": True},
    "wva": {"interval": 60.0, "kv_spare": 0.1, "queue_spare": 3.0},
}


@dataclass(slots=True)
class InEngine:
    """A rule inside every worker, at a given trajectory of replicas."""

    make: Callable[[StepTable], Pilot]
    drafted: int = 0
    """Set for vLLM's adaptive verification, which knows the confidence of every token."""

    def pilot(self, fleet: Fleet, index: int) -> Pilot:
        truth = fleet.truth(index)
        if self.drafted:
            return AdaptiveVerification(truth.table, truth.records, fleet.trace.kinds, truth.quality, self.drafted)
        return self.make(truth.table)

    def poll(self, fleet: Fleet, now: float) -> int | None:
        return None


@dataclass(slots=True)
class Following:
    """Depths of one controller at the replicas of another one."""

    inner: Controller
    trajectory: tuple[int, ...]

    def pilot(self, fleet: Fleet, index: int) -> Pilot:
        return self.inner.pilot(fleet, index)

    def poll(self, fleet: Fleet, now: float) -> int | None:
        self.inner.poll(fleet, now)
        at = min(len(fleet.trajectory), len(self.trajectory) - 1)
        return self.trajectory[at]


def controller(
    name: str, trace: Trace, library: Library, seed: int, tuned: Tuned, trajectory: tuple[int, ...] | None = None
) -> Controller:
    """Depth policies and oracles follow ``trajectory`` where there is one; ``tuned["ours"]`` are fields of
    spec.speculation. Raises KeyError for an unknown name.
    """
    given = tuned.get("ours", {})
    if name in OURS:
        given = {**given, **CHAINS} if name != "ours" else given
        return Ours(trace, seed, scaled=trace.is_scaled and trace.family == "scaling", given=given)
    tree = TreeSpec.model_validate(given.get("tree", {}))
    if name in SCALERS:
        return Scaled(Constrained(trace, library), _rule(name, trace, library, tuned))
    chosen: Controller
    if name == "clairvoyant":
        chosen = Clairvoyant(trace, tree)
    elif name == "constrained":
        chosen = Constrained(trace, library, tree=tree)
    else:
        chosen = InEngine(_engine(name, tuned), _drafted(name, tuned))
    return chosen if trajectory is None else Following(chosen, trajectory)


def _engine(name: str, tuned: Tuned) -> Callable[[StepTable], Pilot]:
    if name in FIXED:
        return lambda table: Fixed(int(name.removeprefix("fixed-")))
    given = {**DEFAULTS[name], **tuned.get(name, {})}
    if name == "vllm-table":
        return lambda table: BatchTable(tuple(given["edges"]), tuple(given["depths"]))
    if name == "vllm-adaptive":
        return lambda table: Fixed(given["drafted"])
    if name == "sglang":
        return lambda table: StepTiers(SGLANG_TABLES[given["table"]], given["alpha"])
    if name == "trtllm":
        return lambda table: OneWayGate(**given)
    return lambda table: Goodput(_fitted(table), **given)


def _drafted(name: str, tuned: Tuned) -> int:
    """Return the draft tokens of vLLM's adaptive verification; 0 for other rules."""
    return int({**DEFAULTS[name], **tuned.get(name, {})}["drafted"]) if name == "vllm-adaptive" else 0


def _rule(name: str, trace: Trace, library: Library, tuned: Tuned) -> Any:
    given = {**DEFAULTS[name], **tuned.get(name, {})}
    if name == "hpa-requests":
        return Hpa(requests, **given)
    if name == "hpa-tokens":
        return Hpa(OutputTokens(), **given)
    if name == "wva":
        return Saturation(**given)
    kind = trace.kinds[0]
    accepted = accepted_tokens(library.records, kind.domain, kind.quality(0.0))[3]
    return Throughput(library.tables[trace.table], accepted, **given)


_FITS: dict[str, Callable[[float, float, float, float], float]] = {}


def _fitted(table: StepTable) -> Callable[[float, float, float, float], float]:
    """A linear step time by least squares over the table: what an engine profiles before it serves."""
    if table.name not in _FITS:
        rows, seconds = [], []
        for sequences in table.sequences:
            for depth in range(DEEPEST + 1):
                for context in table.contexts[:3]:
                    kv = sequences * context
                    rows.append((1.0, sequences, sequences * (depth + 1), float(depth), kv))
                    seconds.append(table.seconds(sequences, sequences * (depth + 1), depth, kv))
        weights = 1 / np.array(seconds)
        fit = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(rows)), rcond=None)[0].tolist()
        floor = 0.3 * min(seconds)

        def predict(sequences: float, verify: float, passes: float, kv: float) -> float:
            x = (1.0, sequences, verify, passes, kv)
            return max(floor, float(sum(a * b for a, b in zip(fit, x, strict=True))))

        _FITS[table.name] = predict
    return _FITS[table.name]
