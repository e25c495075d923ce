"""promtool and prometheus for tests, and the series that dashboard and alert queries use.

Used by tests/chart without a server and by tests/e2e with one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


class PrometheusMissing(Exception):
    """Prometheus is not on PATH and cannot be downloaded; the message gives the reason."""


class Promtool:
    """Caller of promtool. Its ``folder`` also contains prometheus."""

    def __init__(self) -> None:
        done = subprocess.run([ROOT / "hack/cluster/prometheus"], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise PrometheusMissing(done.stderr.strip())
        self.folder = Path(done.stdout.strip())

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.folder / "promtool", *arguments], capture_output=True, text=True, timeout=240)


def queries_of(dashboard: dict[str, Any]) -> list[str]:
    """Return every query of panels, annotations and variables, with Grafana's variables substituted."""
    return [_filled(query) for query in _raw_queries(dashboard)]


def series_of(query: str) -> set[str]:
    """Return the names of specdecode series in a query."""
    return set(re.findall(r"\bspecdecode_\w+", query))


def known_series() -> set[str]:
    """Return the names of all series that a worker, a router or the operator exposes.

    The libraries are imported here because conftest.py imports this file also where the operator's libraries are not
    installed.
    """
    from prometheus_client.metrics import MetricWrapperBase

    from specdecode_operator import metrics as operator_metrics
    from specdecode_operator.metrics import DeploymentGauge
    from specdecode_router.telemetry.metrics import RouterMetrics
    from specdecode_worker.contract import Metric

    own = {m._name for m in vars(operator_metrics).values() if isinstance(m, MetricWrapperBase)}
    own |= {m.name for m in vars(operator_metrics).values() if isinstance(m, DeploymentGauge)}
    of_router = {family.name for family in RouterMetrics().registry.collect()}
    return {f"{name}{suffix}" for name in own | of_router | set(Metric) for suffix in SUFFIXES}


def _raw_queries(dashboard: dict[str, Any]) -> Iterator[str]:
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))
    yield from (annotation["expr"] for annotation in dashboard["annotations"]["list"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.fullmatch(r"label_values\((.*), \w+\)", variable["definition"])
            assert inner, variable["definition"]
            yield inner[1]


def _filled(query: str) -> str:
    for name, value in {"$__rate_interval": "1m", "$namespace": ".*", "$name": ".*"}.items():
        query = query.replace(name, value)
    assert "$" not in query, f"a variable that nobody fills in: {query}"
    return query
