"""PNG plots of a simulation's document: time per token by policy and by trace, and misses against replica hours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdecode_simulator.errors import SimulatorError
from specdecode_simulator.policies.registry import FIXED, ORACLES, SCALERS

MARKS = "xov^s*Ph<>"
TICKS = (0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)


def prepare(folder: Path) -> None:
    """To be called before hours of simulation. Raises SimulatorError where matplotlib is missing, and OSError."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise SimulatorError("--plot needs matplotlib; install it: pip install matplotlib") from None
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)


def plot(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Files in a folder that is prepared."""
    made = [_regret(document, folder / "simulate-regret.png")]
    if document["policies"]:
        made.append(_policies(document, folder / "simulate-policies.png"))
    scaled = {name: trace for name, trace in document["traces"].items() if trace["family"] == "scaling"}
    return [*made, _pareto(scaled, folder / "simulate-scaling.png")] if scaled else made


def _regret(document: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import pyplot as plt

    traces: Mapping[str, Any] = document["traces"]
    names = list(dict.fromkeys(name for trace in traces.values() for name in trace["policies"]))
    names = sorted((name for name in names if name not in SCALERS), key=FIXED.__contains__)
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(traces) + 2))
    for index, name in enumerate(names):
        rows = [
            (over["mean"], -at)
            for at, trace in enumerate(traces.values())
            if (over := trace["policies"].get(name, {}).get("time_per_token"))
        ]
        axes.scatter([min(x, 2.0) for x, _ in rows], [y for _, y in rows], **_style(name, index))
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_yticks([-at for at in range(len(traces))], list(traces))
    axes.set_xlabel("time per token over the constrained oracle's (2 and more at the edge)")
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


def _policies(document: Mapping[str, Any], path: Path) -> Path:
    """A row a rule, best mean on top: a dot for every trace, a bar at the mean, the worst trace by name."""
    from matplotlib import pyplot as plt

    traces, rows = document["policies"]["traces"], document["policies"]["over_constrained_oracle"]
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(rows) + 1.2))
    for at, (name, row) in enumerate(rows.items()):
        color = "black" if name == "ours" else "gray" if name in FIXED else "C0" if name in ORACLES else "C1"
        over = [document["traces"][trace]["policies"][name]["time_per_token"]["mean"] for trace in traces]
        axes.scatter(over, [-at] * len(over), s=18, alpha=0.45, color=color, linewidths=0)
        axes.scatter(row["mean"], -at, marker="|", s=160, color=color, linewidths=2)
        if name not in ORACLES:
            axes.annotate(
                row["trace"], (row["worst"], -at), (5, 0), textcoords="offset points", va="center", fontsize=7
            )
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_yticks([-at for at in range(len(rows))], list(rows))
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")
    ticks = [tick for tick in TICKS if tick <= 1.1 * max(row["worst"] for row in rows.values())]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.margins(x=0.12)
    axes.set_xlabel("time per token over the constrained oracle's: every trace, and the mean")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


def _pareto(traces: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(1, len(traces), figsize=(3.2 * len(traces), 3.2), squeeze=False)
    for axes, (name, trace) in zip(grid[0], traces.items(), strict=True):
        for index, policy in enumerate(("ours", *SCALERS)):
            if policy in trace["policies"]:
                figures = trace["policies"][policy]
                x, y = figures["replica_hours"]["mean"], 100 * figures["slo_misses"]["mean"]
                axes.scatter(x, y, **_style(policy, index))
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("replica hours")
        axes.set_ylabel("missed objectives, %")
    grid[0][-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


def _style(policy: str, index: int) -> dict[str, Any]:
    """Ours is in front; a fixed depth is its number in gray; every rule has a mark of its own."""
    if policy == "ours":
        return {"label": policy, "zorder": 3, "marker": "D", "color": "black"}
    if policy in FIXED:
        return {"label": policy, "zorder": 2, "marker": f"${FIXED.index(policy)}$", "color": "gray"}
    return {"label": policy, "zorder": 2, "marker": MARKS[index % len(MARKS)], "color": f"C{index % 10}"}
