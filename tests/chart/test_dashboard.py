"""Checks of the Grafana dashboard: queries parse in promtool, use existing series, and panels have descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.manifests import pod_template, router_workload
from support.operators.fleet import DEFAULTS, deployment_of
from support.prometheus import Promtool, known_series, queries_of, series_of


@pytest.fixture(scope="module")
def dashboard(root: Path) -> dict[str, Any]:
    return json.loads((root / "helm" / "specdecode" / "files" / "dashboard.json").read_text())  # type: ignore[no-any-return]


def test_every_query_parses(promtool: Promtool, dashboard: dict[str, Any], tmp_path: Path) -> None:
    """Each one is checked as a recording rule, because promtool cannot parse a query without a server."""
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries_of(dashboard))]
    assert len(rules) > 30
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stderr + done.stdout


def test_dashboard_queries_only_exposed_series(dashboard: dict[str, Any]) -> None:
    for query in queries_of(dashboard):
        assert series_of(query), query
        assert series_of(query) <= known_series(), query


def test_dashboard_shows_the_kubectl_columns(dashboard: dict[str, Any]) -> None:
    shown = set().union(*map(series_of, queries_of(dashboard)))
    columns = {"ready_replicas", "depth", "acceptance_rate", "speedup", "realised_gain_ratio", "condition"}
    assert {f"specdecode_{name}" for name in columns} <= shown


def test_panels_have_titles_descriptions_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
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


def test_config_map_has_the_grafana_sidecar_label(chart: Any, dashboard: dict[str, Any]) -> None:
    assert not chart.template().of("ConfigMap")
    asked = {"metrics": {"dashboard": {"enabled": True, "annotations": {"grafana_folder": "Models"}}}}
    config_map = chart.template(asked).one("ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["metadata"]["annotations"] == {"grafana_folder": "Models"}
    assert json.loads(config_map["data"]["specdecode.json"]) == dashboard


@pytest.mark.parametrize("tls", [None, {"name": "cert"}], ids=["http", "https"])
def test_the_monitor_scrapes_each_pod_once_and_by_the_scheme_that_it_serves(chart: Any, tls: Any) -> None:
    monitor = chart.template({"metrics": {"podMonitor": {"enabled": True}}}).one("PodMonitor")["spec"]
    described = {"model": {"uri": "embedded://t"}, "speculation": {"method": "none"}, "tlsSecretRef": tls}
    deployment = deployment_of(described)
    for pod in (pod_template(deployment, DEFAULTS), router_workload(deployment, DEFAULTS)["spec"]["template"]):
        (container,) = pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        (endpoint,) = [one for one in monitor["podMetricsEndpoints"] if one["port"] in ports]
        probed = container["readinessProbe"]["httpGet"]
        assert ports[endpoint["port"]] == probed["port"] == 8000
        assert endpoint["scheme"].upper() == probed.get("scheme", "HTTP")
        assert ("tlsConfig" in endpoint) == (tls is not None)


def test_monitors_set_the_labels_that_the_queries_use(chart: Any) -> None:
    """Labels that the operator exports replace those of its scrape target; workers get labels from their pods."""
    assert not {"ServiceMonitor", "PodMonitor"} & {manifest["kind"] for manifest in chart.template()}
    asked = {"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}}
    rendered = chart.template(asked)
    (endpoint,) = rendered.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True
    monitor = rendered.one("PodMonitor")["spec"]
    assert monitor["namespaceSelector"] == {"any": True}
    assert monitor["selector"]["matchExpressions"][0]["values"] == ["worker", "prefill", "router"]
    for endpoint in monitor["podMetricsEndpoints"]:
        assert endpoint["relabelings"][0]["targetLabel"] == "name"
    watched = chart.template({**asked, "watchNamespaces": ["a", "b"]}).one("PodMonitor")["spec"]
    assert watched["namespaceSelector"] == {"matchNames": ["a", "b"]}
