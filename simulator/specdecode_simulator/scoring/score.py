"""Scores: every policy over the oracles, paired by seed, with 95 % intervals; and the targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdecode_simulator.policies.registry import SCALERS
from specdecode_simulator.scoring.run import Run

ORACLE, CLAIRVOYANT = "constrained", "clairvoyant"
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % points of Student's t by degrees of freedom, from 1 on."""

Runs = Mapping[int, Mapping[str, Run]]
"""Runs of one trace, by seed and policy."""


class Interval(NamedTuple):
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of values that are paired already; one value has no interval."""
        mean = sum(values) / len(values)
        if len(values) < 2:
            return cls(mean, mean, mean)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
        point = _T95[min(len(values) - 2, len(_T95) - 1)]
        return cls(mean, mean - point * spread, mean + point * spread)

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 5) for name, value in self._asdict().items()}


def scored(runs: Runs) -> dict[str, Any]:
    """Per policy: time per token over the constrained oracle's and over the clairvoyant's, and the plain figures."""
    names = list(dict.fromkeys(name for runs_of_seed in runs.values() for name in runs_of_seed))
    return {name: _policy(name, runs) for name in names}


def _policy(name: str, runs: Runs) -> dict[str, Any]:
    own = [runs_of_seed[name].figures for runs_of_seed in runs.values() if name in runs_of_seed]
    document: dict[str, Any] = {
        "time_per_token": _over(name, ORACLE, runs),
        "time_per_token_over_clairvoyant": _over(name, CLAIRVOYANT, runs),
        "milliseconds_per_token": Interval.of([1000 * figures.time_per_token for figures in own]).rounded(),
    }
    if "ours" in runs[next(iter(runs))] and name != "ours":
        document["time_per_token_over_ours"] = _over(name, "ours", runs)
    for field in ("plan_changes_per_hour", "slo_misses", "replica_hours", "ttft_p95"):
        document[field] = Interval.of([getattr(figures, field) for figures in own]).rounded()
    return document


def _over(name: str, oracle: str, runs: Runs) -> dict[str, float] | None:
    ratios = [
        runs_of_seed[name].figures.time_per_token / runs_of_seed[oracle].figures.time_per_token
        for runs_of_seed in runs.values()
        if name in runs_of_seed and oracle in runs_of_seed
    ]
    return Interval.of(ratios).rounded() if ratios else None


def by_policy(traces: Mapping[str, Any]) -> dict[str, Any]:
    """Over the traces that all rules of depth ran: the mean over the constrained oracle, and the worst trace. Best
    first; nothing where no trace has all of them.
    """
    names = {name for trace in traces.values() for name in trace["policies"]} - set(SCALERS)
    common = [label for label, trace in traces.items() if all(_mean(trace, name) is not None for name in names)]
    if not common:
        return {}
    over = {name: {trace: _mean(traces[trace], name) or 0.0 for trace in common} for name in names}
    rows = {name: _mean_and_worst(values) for name, values in over.items()}
    best_first = sorted(rows.items(), key=lambda item: item[1]["mean"])
    return {"traces": common, "over_constrained_oracle": dict(best_first)}


def _mean_and_worst(over: Mapping[str, float]) -> dict[str, Any]:
    worst = max(over, key=lambda name: over[name])
    return {"mean": round(sum(over.values()) / len(over), 5), "worst": over[worst], "trace": worst}


def targets(traces: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operator's figures that targets exist for."""
    regret = {name: _mean(trace, "ours") for name, trace in traces.items() if _mean(trace, "ours") is not None}
    if not regret:
        return {}
    worst = max(regret, key=lambda name: regret[name] or 0.0)
    return {
        "mean_over_constrained_oracle": round(sum(value or 0.0 for value in regret.values()) / len(regret), 5),
        "worst_trace": {"trace": worst, "over_constrained_oracle": regret[worst]},
        "plan_changes_per_hour_on_stationary": {
            name: trace["policies"]["ours"]["plan_changes_per_hour"]["mean"]
            for name, trace in traces.items()
            if trace["family"] == "stationary" and "ours" in trace["policies"]
        },
        "beaten_by": {name: beaten for name, trace in traces.items() if (beaten := _beaten(trace))},
        "dominated_by": {name: by for name, trace in traces.items() if (by := dominated(trace))},
        "answers": _answers(traces),
    }


def _mean(trace: Mapping[str, Any], policy: str) -> float | None:
    over = trace["policies"].get(policy, {}).get("time_per_token")
    return None if over is None else float(over["mean"])


def _beaten(trace: Mapping[str, Any]) -> dict[str, float]:
    """Baselines that were surely faster than ours; on stationary traces by more than 2 %."""
    margin = 0.98 if trace["family"] == "stationary" else 1.0
    return {
        name: policy["time_per_token_over_ours"]["mean"]
        for name, policy in trace["policies"].items()
        if name not in (ORACLE, CLAIRVOYANT, *SCALERS)
        and (over := policy.get("time_per_token_over_ours"))
        and over["mean"] < margin
        and (over["high"] < 1.0 or over["high"] == over["mean"])
    }


def dominated(trace: Mapping[str, Any]) -> list[str]:
    """Scaling rules that are no worse than ours in misses and in replica hours, and better in one of them."""
    ours = trace["policies"].get("ours")
    if ours is None or trace["family"] != "scaling":
        return []
    names = (name for name in SCALERS if name in trace["policies"])
    return [name for name in names if _dominates(_point(trace["policies"][name]), _point(ours))]


def _point(policy: Mapping[str, Any]) -> tuple[float, float]:
    """In the plane of a Pareto front: share of misses, replica hours."""
    return policy["slo_misses"]["mean"], policy["replica_hours"]["mean"]


def _dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _answers(traces: Mapping[str, Any]) -> dict[str, Any]:
    """By what a depth may cost over the best to be an answer."""
    answers = [answer for trace in traces.values() for answer in trace.get("answers", ())]
    levels = sorted({answer["within"] for answer in answers})
    return {f"{within:g}": answered([one for one in answers if one["within"] == within]) for within in levels}


def answered(answers: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return how many steps of acceptance were answered, in time and at all; ``answers`` are those of one cost."""
    in_time = [one for one in answers if one["answered"] and (one["seconds"] <= 30 or one["drafts"] <= 1000)]
    return {
        "steps": len(answers),
        "within_30_s_or_1000_drafts": len(in_time),
        "median_seconds": sorted(one["seconds"] for one in answers)[len(answers) // 2],
        "never": sum(not one["answered"] for one in answers),
    }
