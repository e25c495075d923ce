"""Check docs/reference/metrics.md: its generated tables have every metric, and its lists by hand what they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.metrics import MetricWrapperBase

from specdecode_operator import metrics as operator_metrics
from specdecode_operator.metrics import DeploymentGauge
from specdecode_router.queueing.refusals import RefusalReason
from specdecode_router.telemetry.metrics import ResumeOutcome, ResumeReason, RouterMetrics, Stage
from specdecode_worker.capture import Dropped
from specdecode_worker.contract import Metric
from specdecode_worker.metrics import VLLM_CACHE_CONFIG, VLLM_METRICS, vllm_name


@pytest.fixture
def sections(root: Path) -> dict[str, str]:
    """Return the text of each section by the first word of its heading."""
    page = (root / "docs" / "reference" / "metrics.md").read_text()
    return {part.split()[0].strip(":"): part for part in page.split("\n## ")[1:]}


def listed(section: str) -> set[str]:
    return {name.removesuffix("_total") for name in re.findall(r"^\| `(specdecode_\w+)`", section, re.MULTILINE)}


def test_page_lists_every_worker_metric(sections: dict[str, str]) -> None:
    assert listed(sections["Worker"]) == set(Metric)
    for reason in Dropped:
        assert reason.value in sections["Worker"]


def test_page_lists_every_metric_under_vllms_names(sections: dict[str, str]) -> None:
    named, absent = sections["vLLM's"].split("What vLLM 0.33 has and a worker does not:")
    exported = {vllm_name(name) for name in VLLM_METRICS} | {VLLM_CACHE_CONFIG}
    assert {name.removesuffix("_total") for name in re.findall(r"`(vllm:\w+)`", named)} == exported
    assert not exported & {name.removesuffix("_total") for name in re.findall(r"`(vllm:\w+)`", absent)}


def test_page_lists_every_operator_metric(sections: dict[str, str]) -> None:
    found = vars(operator_metrics).values()
    names = {one._name for one in found if isinstance(one, MetricWrapperBase)}
    names |= {one.name for one in found if isinstance(one, DeploymentGauge)}
    assert listed(sections["Operator"]) == names
    for reason in get_args(operator_metrics.CallFailure):
        assert f"| {reason} | " in sections["Operator"]


def test_page_lists_every_router_metric_and_label_value(sections: dict[str, str]) -> None:
    families = {family.name for family in RouterMetrics().registry.collect()}
    assert listed(sections["Router"]) == {name for name in families if name.startswith("specdecode_")}
    for values in (RefusalReason, Stage, ResumeReason, ResumeOutcome):
        for value in values:
            assert f" | {value} | " in sections["Router"]


def test_a_counter_is_listed_as_it_is_exposed(sections: dict[str, str]) -> None:
    rows = [
        row for section in sections.values() for row in re.findall(r"^\| `(specdecode_\w+)` \| (\w+) ", section, re.M)
    ]
    assert len(rows) > 90
    for name, kind in rows:
        assert name.endswith("_total") == (kind == "counter"), name
