"""Checks that the examples and the CRD agree with the models in the code, and that bare pods run on any cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION, Spec
from specdecode_operator.manifests import pod_template, selector, service, worker_config
from specdecode_worker.contract import Port
from support.operators.fleet import DEFAULTS, deployment_of, deployment_with

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
EVERY_FIELD = FOLDER / "reference" / "every-field.yaml"


@pytest.mark.parametrize("path", [*EXAMPLES, EVERY_FIELD], ids=lambda path: path.stem)
def test_example_matches_the_models(path: Path) -> None:
    """Every example is valid according to the models, which are the CRD's source."""
    (example,) = yaml.safe_load_all(path.read_text())
    assert (example["apiVersion"], example["kind"]) == (f"{GROUP}/{VERSION}", KIND)
    spec = Spec.model_validate(example["spec"], extra="forbid")
    default = spec.model.uri.rpartition("/")[2]
    assert worker_config(spec, "uid").model.served_name == example["spec"]["model"].get("servedName", default)


@pytest.fixture(scope="module")
def schema(root: Path) -> dict[str, Any]:
    """Return the schema of ``spec`` in the CRD."""
    (file,) = (root / "crds").glob(f"{PLURAL}.*")
    crd = yaml.safe_load(file.read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]  # type: ignore[no-any-return]


def test_one_example_has_every_field(schema: dict[str, Any]) -> None:
    spec = yaml.safe_load(EVERY_FIELD.read_text())["spec"]
    assert list(absent(spec, schema, "spec")) == []
    del spec["router"]["holdTimeout"], spec["speculation"]["tasks"][0]["merge"][0]["depth"]
    assert sorted(absent(spec, schema, "spec")) == ["spec.router.holdTimeout", "spec.speculation.tasks.merge.depth"]


def absent(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the fields of a schema that an object lacks, in lists those that all items lack."""
    schema = schema.get("items", schema)
    objects = value if isinstance(value, list) else [value]
    for name, field in schema.get("properties", {}).items():
        values = [one[name] for one in objects if name in one]
        if not values:
            yield f"{path}.{name}"
            continue
        lists = [one for one in values if isinstance(one, list)]
        yield from absent([item for one in lists for item in one] if lists else values, field, f"{path}.{name}")


def test_the_least_example_has_six_lines() -> None:
    text = (FOLDER / "minimal.yaml").read_text()
    assert len(text.partition("\nspec:\n")[2].splitlines()) == 6


def test_gateways_refer_to_objects_of_the_examples(root: Path) -> None:
    """Compare names, ports and labels with what the operator makes. tests/api_server/crd has the rules of the CRDs."""
    examples = [yaml.safe_load(path.read_text()) for path in EXAMPLES]
    specs = {resource["metadata"]["name"]: resource["spec"] for resource in examples}
    files = sorted((root / "examples" / "gateway").glob("*.yaml"))
    routed, pool, pooled = (document for file in files for document in yaml.safe_load_all(file.read_text()))
    (backend,) = routed["spec"]["rules"][0]["backendRefs"]
    deployment = deployment_of(specs[backend["name"]], name=backend["name"])
    assert deployment.spec.router.replicas > 0, "the route goes to routers"
    assert backend["port"] in {port["port"] for port in service(deployment)["spec"]["ports"]}
    assert pool["spec"]["selector"]["matchLabels"].items() <= selector(pool["metadata"]["name"]).items()
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [Port.http]
    (reference,) = pooled["spec"]["rules"][0]["backendRefs"]
    assert (reference["kind"], reference["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(f"{reference['group']}/")


def test_the_charts_crd_renders_to_the_crd(chart: Any, root: Path) -> None:
    crds = [yaml.safe_load(crd_file.read_text()) for crd_file in sorted((root / "crds").glob("*.yaml"))]
    assert chart.template().of("CustomResourceDefinition") == crds


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_pods_need_no_object_that_the_example_does_not_name(path: Path) -> None:
    """Pods need nothing that a cluster with NVIDIA's device plugin alone lacks, or the example says so."""
    text = path.read_text()
    header = text[: text.index("apiVersion")]
    (document,) = yaml.safe_load_all(text)
    pod: dict[str, Any] = pod_template(deployment_with(**document["spec"]), DEFAULTS)["spec"]
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
