"""Checks of the Grafana dashboard: queries parse in promtool, use existing series, and panels have descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import Promtool, known_series, queries_of, series_of


@pytest.fixture(scope="module")
def dashboard(root: Path) -> dict[str, Any]:
    return json.loads((root / "helm" / "specdecode" / "files" / "dashboard.json").read_text())  # type: ignore[no-any-return]


def test_every_query_parses(promtool: Promtool, dashboard: dict[str, Any], tmp_path: Path) -> None:
    """Every query parses.

    Each one is checked as a recording rule, because promtool cannot parse a query without a server.
    """
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries_of(dashboard))]
    assert len(rules) > 30
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stderr + done.stdout


def test_every_query_asks_for_series_that_are_exposed(dashboard: dict[str, Any]) -> None:
    for query in queries_of(dashboard):
        assert series_of(query), query
        assert series_of(query) <= known_series(), query


def test_what_the_columns_show_is_on_it(dashboard: dict[str, Any]) -> None:
    shown = set().union(*map(series_of, queries_of(dashboard)))
    columns = {"ready_replicas", "depth", "acceptance_rate", "speedup", "realised_gain_ratio", "condition"}
    assert {f"specdecode_{name}" for name in columns} <= shown


def test_panels_have_titles_words_and_room(dashboard: dict[str, Any]) -> None:
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert all(panel["title"] and panel["description"] for panel in panels)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_config_map_carries_the_label_of_grafanas_sidecar(chart: Any, dashboard: dict[str, Any]) -> None:
    assert not chart.template().of("ConfigMap")
    asked = {"metrics": {"dashboard": {"enabled": True, "annotations": {"grafana_folder": "Models"}}}}
    found = chart.template(asked).one("ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "Models"}
    assert json.loads(found["data"]["specdecode.json"]) == dashboard


def test_monitors_give_the_labels_that_the_queries_go_by(chart: Any) -> None:
    """The monitors keep the labels namespace and name of a deployment.

    The labels that the operator exports must win over those of the scrape target; workers get theirs from their pods.
    """
    assert not chart.template().of("PodMonitor")
    asked = {"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}}
    rendered = chart.template(asked)
    (endpoint,) = rendered.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True
    monitor = rendered.one("PodMonitor")["spec"]
    assert monitor["namespaceSelector"] == {"any": True}
    assert monitor["podMetricsEndpoints"][0]["relabelings"][0]["targetLabel"] == "name"
    watched = chart.template({**asked, "watchNamespaces": ["a", "b"]}).one("PodMonitor")["spec"]
    assert watched["namespaceSelector"] == {"matchNames": ["a", "b"]}
