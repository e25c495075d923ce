"""Check the manifests in route-traffic.md and scale.md: they are valid and name what operator and routers make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.manifests import router_name
from specdecode_router.telemetry.metrics import RouterMetrics


@pytest.fixture
def blocks(root: Path) -> list[dict[str, Any]]:
    """Return the YAML blocks of the page."""
    text = "".join((root / "docs" / "how-to" / name).read_text() for name in ("route-traffic.md", "scale.md"))
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.S | re.M)]


def test_the_autoscaler_of_the_page_follows_an_exported_gauge(blocks: list[dict[str, Any]]) -> None:
    (scaler,) = [block for block in blocks if block.get("kind") == "HorizontalPodAutoscaler"]
    assert scaler["apiVersion"] == "autoscaling/v2"
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"], target["name"]) == ("apps/v1", "Deployment", router_name("llama"))
    (metric,) = scaler["spec"]["metrics"]
    gauges = {one._name for one in vars(RouterMetrics()).values()
              if isinstance(one, MetricWrapperBase) and one._type == "gauge"}  # fmt: skip
    assert metric["pods"]["metric"]["name"] in gauges
    assert metric["pods"]["target"]["type"] == "AverageValue"


def test_patches_of_the_page_are_valid(root: Path) -> None:
    example = yaml.safe_load((root / "examples" / "router.yaml").read_text())["spec"]
    text = (root / "docs" / "how-to" / "route-traffic.md").read_text()
    patches = [yaml.safe_load(patch) for patch in re.findall(r"-p (?:\\\n\s*)?'(\{.*?\})'", text)]
    assert len(patches) >= 2
    for patch in patches:
        router = {**example["router"], **patch["spec"]["router"]}
        Spec.model_validate({**example, "router": router, "scaling": {"minReplicas": 1}}, extra="forbid")
