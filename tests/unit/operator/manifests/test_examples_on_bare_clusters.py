"""Pods of the examples need nothing that a cluster with NVIDIA's device plugin alone lacks, or the example says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator import manifests
from support.operators.fleet import DEFAULTS, deployment_with

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_pods_need_no_object_that_the_example_does_not_name(example: Path) -> None:
    text = example.read_text()
    header = text[: text.index("apiVersion")]
    (document,) = yaml.safe_load_all(text)
    pod: dict[str, Any] = manifests.pod_template(deployment_with(**document["spec"]), DEFAULTS)["spec"]
    assert not pod.get("nodeSelector"), "labels come from another component than the device plugin"
    assert not pod.get("affinity")
    assert not pod.get("runtimeClassName")
    for volume in pod["volumes"]:
        assert "persistentVolumeClaim" not in volume, volume
        assert "hostPath" not in volume, volume
    secrets = {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for container in (*pod["initContainers"], *pod["containers"])
        for variable in container["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    says = " ".join(header.replace("#", " ").split())
    for name in secrets:
        assert f"create secret generic {name} " in says or "the hub's token too" in says, name
    limits = pod["containers"][0]["resources"].get("limits", {})
    assert limits.keys() <= {"cpu", "memory", "nvidia.com/gpu"}
    if "nvidia.com/gpu" in limits:
        assert "GB" in header
        assert "ephemeral storage" in header
