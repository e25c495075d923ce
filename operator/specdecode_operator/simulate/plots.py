"""PNG plots of a simulation's document: regret by trace and policy, and misses against replica hours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdecode_operator.errors import SettingsError
from specdecode_operator.simulate.policies.registry import FIXED, SCALERS

MARKS = "xov^s*Ph<>"


def plot(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Raises SettingsError where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise SettingsError("--plot needs matplotlib; install it: pip install matplotlib") from None
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = [_regret(document, folder / "simulate-regret.png")]
    scaled = {name: found for name, found in document["traces"].items() if found["family"] == "scaling"}
    return [*made, _pareto(scaled, folder / "simulate-scaling.png")] if scaled else made


def _regret(document: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import pyplot as plt

    traces: Mapping[str, Any] = document["traces"]
    names = list(dict.fromkeys(name for found in traces.values() for name in found["policies"]))
    names = sorted((name for name in names if name not in SCALERS), key=FIXED.__contains__)
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(traces) + 2))
    for index, name in enumerate(names):
        rows = [
            (over["mean"], -at)
            for at, found in enumerate(traces.values())
            if (over := found["policies"].get(name, {}).get("time_per_token"))
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


def _pareto(traces: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(1, len(traces), figsize=(3.2 * len(traces), 3.2), squeeze=False)
    for axes, (name, found) in zip(grid[0], traces.items(), strict=True):
        for index, policy in enumerate(("ours", *SCALERS)):
            if policy in found["policies"]:
                figures = found["policies"][policy]
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
    """Ours stands out, and in front; a fixed depth is its number in gray; every rule has a mark of its own."""
    if policy == "ours":
        return {"label": policy, "zorder": 3, "marker": "D", "color": "black"}
    if policy in FIXED:
        return {"label": policy, "zorder": 2, "marker": f"${FIXED.index(policy)}$", "color": "gray"}
    return {"label": policy, "zorder": 2, "marker": MARKS[index % len(MARKS)], "color": f"C{index % 10}"}
