"""``history``: the last decisions, what they promised and what they brought. Pure."""

from __future__ import annotations

from typing import Any

from specdecode_operator.plugin.overview import status_of
from specdecode_operator.plugin.text import age, percent, table, wrapped

HEAD = ("AGE", "KIND", "BEFORE", "AFTER", "EXPECTED", "REALISED", "WHERE")


def past(resource: dict[str, Any], now: float) -> list[str]:
    """Newest first; under each line what was measured and why."""
    speculation = status_of(resource).speculation
    history = speculation.history if speculation else ()
    if not history:
        return [f"nothing was decided for {resource['metadata']['name']} yet"]
    rows = [
        (
            age(found.time, now),
            found.kind,
            found.before,
            found.after,
            percent(found.expected_gain_percent),
            percent(found.realised_gain_percent),
            found.load,
        )
        for found in history
    ]
    head, *lines = table(HEAD, rows)
    out = [head]
    for line, found in zip(lines, history, strict=True):
        out.append(line)
        out += wrapped(f"measured: {found.measured}", "      ") if found.measured else []
        out += wrapped(f"because:  {found.reason}", "      ")
    return out
