"""Checks of the chart's alert rules with promtool: they parse, fire when they should and carry annotations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.prometheus import Promtool, known_series, series_of

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent / "alerts_test.yaml"
RUNBOOKS = "https://specdecode.io/docs/reference/conditions-and-alerts/"


@pytest.fixture(scope="module")
def file(root: Path) -> Path:
    return root / "helm" / "specdecode" / "files" / "alerts.yaml"


@pytest.fixture(scope="module")
def alerts(file: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def test_promtool_accepts_the_rules_file(promtool: Promtool, file: Path) -> None:
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stderr + done.stdout


def test_alerts_pass_their_unit_tests(promtool: Promtool) -> None:
    done = promtool("test", "rules", str(TESTS))
    assert done.returncode == 0, done.stderr + done.stdout


def test_every_alert_has_a_firing_and_a_quiet_unit_test(alerts: list[dict[str, Any]]) -> None:
    fires: dict[str, set[bool]] = {}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for check in test.get("promql_expr_test", []):
            (name,) = re.findall(r'alertname="(\w+)"', check["expr"])
            fires.setdefault(name, set()).add(bool(check["exp_samples"]))
    assert fires == {rule["alert"]: {True, False} for rule in alerts}


def test_every_alert_has_a_severity_texts_and_a_runbook(alerts: list[dict[str, Any]], root: Path) -> None:
    page = (root / "docs" / "reference" / "conditions-and-alerts.md").read_text()
    for rule in alerts:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description", "action", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{rule['alert'].lower()}"
    assert re.findall(r"^### (Specdecode\w+)$", page, re.MULTILINE) == [rule["alert"] for rule in alerts]


def test_alerts_query_only_exposed_series(alerts: list[dict[str, Any]]) -> None:
    for rule in alerts:
        assert series_of(rule["expr"]), rule["alert"]
        assert series_of(rule["expr"]) <= known_series(), rule["alert"]


def test_prometheus_rule_resource_equals_the_rules_file(chart: Any, file: Path) -> None:
    assert not chart.template().of("PrometheusRule")
    asked = {"metrics": {"rules": {"enabled": True, "labels": {"release": "p"}}}}
    rule = chart.template(asked).one("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(file.read_text())
    assert rule["metadata"]["labels"]["release"] == "p"
