"""Check that docs/reference/metrics.md lists exactly the metrics that the code exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase

from specdecode_operator import metrics as operator_metrics
from specdecode_operator.metrics import DeploymentGauge
from specdecode_router.queueing.refusals import RefusalReason
from specdecode_router.telemetry.metrics import ResumeOutcome, ResumeReason, RouterMetrics, Stage
from specdecode_worker.contract import Metric
from specdecode_worker.metrics import VLLM_CACHE_CONFIG, VLLM_METRICS, vllm_name

OF_OPERATOR = {
    **{
        metric._name: (metric._type, ", ".join(metric._labelnames))
        for metric in vars(operator_metrics).values()
        if isinstance(metric, MetricWrapperBase)
    },
    **{
        metric.name: ("gauge", ", ".join(metric.labels))
        for metric in vars(operator_metrics).values()
        if isinstance(metric, DeploymentGauge)
    },
}
"""Type and labels of each metric, by name."""


@pytest.fixture
def sections(root: Path) -> dict[str, list[list[str]]]:
    """Return the cells of the table rows, by section."""
    rows_by_section = {}
    for part in (root / "docs" / "reference" / "metrics.md").read_text().split("\n## ")[1:]:
        rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| `specdecode_")]
        rows_by_section[part.split(":")[0]] = [[cell.strip(" `") for cell in row] for row in rows]
    return rows_by_section


def test_page_lists_every_worker_metric(sections: dict[str, list[list[str]]]) -> None:
    assert {name.removesuffix("_total") for name, *_ in sections["Worker"]} == set(Metric)


def test_page_lists_every_metric_under_vllms_names(root: Path) -> None:
    page = (root / "docs" / "reference" / "metrics.md").read_text()
    (section,) = (part for part in page.split("\n## ") if part.startswith("vLLM's names:"))
    listed, absent = section.split("What vLLM 0.33 has and a worker does not:")
    exported = {vllm_name(name) for name in VLLM_METRICS} | {VLLM_CACHE_CONFIG}
    assert {name.removesuffix("_total") for name in re.findall(r"`(vllm:\w+)`", listed)} == exported
    assert not exported & {name.removesuffix("_total") for name in re.findall(r"`(vllm:\w+)`", absent)}


def test_page_lists_every_operator_metric(sections: dict[str, list[list[str]]]) -> None:
    listed = {name.removesuffix("_total"): (kind, labels) for name, kind, labels, _ in sections["Operator"]}
    assert listed == OF_OPERATOR


def test_page_lists_every_router_metric(sections: dict[str, list[list[str]]]) -> None:
    listed = {name.removesuffix("_total"): (kind, labels) for name, kind, labels, _ in sections["Router"]}
    metrics = [m for m in vars(RouterMetrics()).values() if isinstance(m, MetricWrapperBase)]
    exported = {m._name: (m._type, ", ".join(m._labelnames)) for m in metrics}
    assert listed == exported
    families = {family.name for family in RouterMetrics().registry.collect()}
    assert {name for name in families if name.startswith("specdecode_")} == exported.keys()


def test_page_explains_every_label_value_of_the_router(root: Path) -> None:
    page = (root / "docs" / "reference" / "metrics.md").read_text()
    (section,) = (part for part in page.split("\n## ") if part.startswith("Router:"))
    for reason in RefusalReason:
        assert f"| {reason} | " in section
    for stage in Stage:
        assert f"| {stage} | " in section
    for label, values in (("reason", ResumeReason), ("outcome", ResumeOutcome)):
        assert {f"| {label} | {value} | " in section for value in values} == {True}


def test_a_counter_is_listed_as_it_is_exposed(sections: dict[str, list[list[str]]]) -> None:
    for name, kind, *_ in sections["Worker"] + sections["Operator"] + sections["Router"]:
        assert name.endswith("_total") == (kind == "counter"), re.escape(name)
