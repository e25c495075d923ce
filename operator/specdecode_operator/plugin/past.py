"""Text of ``history``: the latest decisions with their expected and realised gains. Pure."""

from __future__ import annotations

from typing import Any

from specdecode_operator.plugin.overview import measuring, status_of
from specdecode_operator.plugin.text import age, percent, table, wrapped

HEAD = ("AGE", "KIND", "BEFORE", "AFTER", "EXPECTED", "REALISED", "LOAD")


def past(resource: dict[str, Any], now: float) -> list[str]:
    """Return a table of decisions, newest first; below each line its measurements and its reason."""
    speculation = status_of(resource).speculation
    history = speculation.history if speculation else ()
    if not history:
        lack = measuring(status_of(resource).conditions)
        return [f"no decisions for {resource['metadata']['name']} yet{f', measuring: {lack}' if lack else ''}"]
    rows = [
        (
            age(decision.time, now),
            decision.kind,
            decision.before,
            decision.after,
            percent(decision.expected_gain_percent),
            percent(decision.realised_gain_percent),
            decision.load,
        )
        for decision in history
    ]
    head, *lines = table(HEAD, rows)
    out = [head]
    for line, decision in zip(lines, history, strict=True):
        out.append(line)
        out += wrapped(f"measured: {decision.measured}", "      ") if decision.measured else []
        out += wrapped(f"reason:   {decision.reason}", "      ")
    return out
