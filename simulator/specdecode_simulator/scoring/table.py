"""A simulation's document as text: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specdecode_simulator.scoring.earlier import COLUMNS as EARLIER
from specdecode_simulator.scoring.earlier import earlier_rows
from specdecode_simulator.scoring.score import ORACLE

COLUMNS = ("policy", "over oracle", "95 %", "over clairvoyant", "changes/h", "misses", "replica h", "p95 TTFT s")
AGAINST = "Ours against the earlier version, paired by seed, each over its constrained oracle:"
BY_POLICY = ("policy", "mean over oracle", "worst", "on")
OVERVIEW = ("trace", "family", "ours over oracle", "95 %", "over clairvoyant", "changes/h", "the oracle's", "misses")


def text(document: Mapping[str, Any]) -> str:
    lines = [_head(document)]
    for name, trace in document["traces"].items():
        lines += ["", f"{name} ({trace['family']})"]
        lines += _aligned([COLUMNS, *_rows(trace)])
    if summary := list(_by_policy(document)):
        lines += ["", _of_all(document), *_aligned([BY_POLICY, *summary])]
    if "against" in document:
        lines += ["", AGAINST, *_aligned([EARLIER, *earlier_rows(document["against"])])]
    return "\n".join([*lines, "", *_targets(document)])


def markdown(document: Mapping[str, Any]) -> str:
    lines = ["# Simulation", "", f"{_head(document)}. Command: `{document['command']}`.", "", *_targets(document)]
    if summary := list(_by_policy(document)):
        lines += ["", _of_all(document), "", *_table(BY_POLICY, summary)]
    if overview := list(_overview(document)):
        lines += ["", *_table(OVERVIEW, overview)]
    if "against" in document:
        lines += ["", AGAINST, "", *_table(EARLIER, earlier_rows(document["against"]))]
    for name, trace in document["traces"].items():
        lines += ["", f"## {name} ({trace['family']})", "", *_table(COLUMNS, _rows(trace))]
    return "\n".join(lines) + "\n"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _of_all(document: Mapping[str, Any]) -> str:
    traces = document["policies"]["traces"]
    return f"Rules of depth, on {len(traces)} traces:" if len(traces) > 1 else f"Rules of depth, on {traces[0]}:"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)]


def _overview(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Ours on every trace, a row each."""
    for name, trace in document["traces"].items():
        policies = trace["policies"]
        if "ours" in policies and ORACLE in policies:
            over, interval, clairvoyant, changes, misses, *_ = _cells(policies["ours"])
            oracles = f"{policies[ORACLE]['plan_changes_per_hour']['mean']:.1f}"
            yield name, trace["family"], over, interval, clairvoyant, changes, oracles, misses


def _by_policy(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Every rule of depth, best first."""
    for name, over in document["policies"].get("over_constrained_oracle", {}).items():
        yield name, f"{over['mean']:.3f}", f"{over['worst']:.3f}", over["trace"]


def _head(document: Mapping[str, Any]) -> str:
    count = len(document["seeds"])
    seeds = "1 seed" if count == 1 else f"{count} seeds"
    return (
        f"{document['hours']:g} simulated hours, {seeds}; time per token over the constrained oracle's, paired by seed"
    )


def _rows(trace: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, figures in trace["policies"].items():
        yield name, *_cells(figures)


def _cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one policy, in the order of COLUMNS."""
    over, clairvoyant = figures["time_per_token"], figures["time_per_token_over_clairvoyant"]
    return (
        f"{over['mean']:.3f}" if over else "-",
        f"{over['low']:.3f}-{over['high']:.3f}" if over else "-",
        f"{clairvoyant['mean']:.3f}" if clairvoyant else "-",
        f"{figures['plan_changes_per_hour']['mean']:.1f}",
        f"{100 * figures['slo_misses']['mean']:.2f} %",
        f"{figures['replica_hours']['mean']:.2f}",
        f"{figures['ttft_p95']['mean']:.2f}",
    )


def _targets(document: Mapping[str, Any]) -> list[str]:
    targets = document.get("targets") or {}
    if not targets:
        return []
    worst = targets["worst_trace"]
    mean = 100 * (targets["mean_over_constrained_oracle"] - 1)
    lines = [
        f"- ours over the constrained oracle: {mean:+.1f} % in the mean, "
        f"{100 * (worst['over_constrained_oracle'] - 1):+.1f} % on {worst['trace']}",
        "- plan changes an hour on stationary noise: "
        + ", ".join(f"{name} {value:.1f}" for name, value in targets["plan_changes_per_hour_on_stationary"].items()),
    ]
    for name, beaten in targets["beaten_by"].items():
        lines.append(f"- {name}: faster than ours: " + ", ".join(f"{by} {over:.3f}" for by, over in beaten.items()))
    for name, by in targets["dominated_by"].items():
        lines.append(f"- {name}: no more misses with no more replica hours than ours: {', '.join(by)}")
    for within, answers in targets["answers"].items():
        lines.append(
            f"- steps of acceptance answered within 30 s or 1,000 drafts by a depth that costs at most {within} of the"
            f" best: {answers['within_30_s_or_1000_drafts']} of {answers['steps']}"
            f" (median {answers['median_seconds']:.0f} s, {answers['never']} never)"
        )
    return lines
