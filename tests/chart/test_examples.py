"""Checks that the examples and the CRD agree with the models in the code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION, Spec, Status
from specdecode_operator.manifests import selector, service, worker_config
from specdecode_operator.types import Deployment
from specdecode_worker.contract import Port

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


@pytest.mark.parametrize("path", [*EXAMPLES, EVERY_FIELD], ids=lambda path: path.stem)
def test_example_matches_the_structural_schema(path: Path, root: Path) -> None:
    (crd,) = (yaml.safe_load(crd_file.read_text()) for crd_file in (root / "crds").glob(f"{PLURAL}.*"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    example = yaml.safe_load(path.read_text())
    assert list(schema_errors(example["spec"], schema["properties"]["spec"], "spec")) == []


def test_one_example_has_every_field(root: Path) -> None:
    (crd,) = (yaml.safe_load(crd_file.read_text()) for crd_file in (root / "crds").glob(f"{PLURAL}.*"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
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
    specs = {resource["metadata"]["name"]: resource["spec"] for resource in map(_example, EXAMPLES)}
    documents = [
        document
        for path in sorted((root / "examples" / "gateway").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]
    (routed, pool, pooled) = documents
    (backend,) = routed["spec"]["rules"][0]["backendRefs"]
    spec = Spec.model_validate(specs[backend["name"]])
    deployment = Deployment(namespace="ns", name=backend["name"], uid="u", generation=1, spec=spec, status=Status())
    assert spec.router.replicas > 0, "the route goes to routers"
    assert backend["port"] in {port["port"] for port in service(deployment)["spec"]["ports"]}
    assert pool["spec"]["selector"]["matchLabels"].items() <= selector(pool["metadata"]["name"]).items()
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [Port.http]
    (reference,) = pooled["spec"]["rules"][0]["backendRefs"]
    assert (reference["kind"], reference["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(f"{reference['group']}/")


def _example(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())  # type: ignore[no-any-return]


def test_schema_check_detects_an_invalid_resource(root: Path) -> None:
    (crd,) = (yaml.safe_load(crd_file.read_text()) for crd_file in (root / "crds").glob(f"{PLURAL}.*"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    bad = {
        "model": {"uri": "x", "size": 1},
        "speculation": {"depth": {"max": 99}, "method": "magic"},
        "workers": {"resources": {"limits": {"cpu": 2, "memory": "much"}}},
        "imagePullSecrets": [{"name": 1}],
    }
    assert sorted(schema_errors(bad, schema, "spec")) == [
        "spec.imagePullSecrets[0].name: 1 is no string",
        "spec.model.size: unknown",
        "spec.model.uri: does not match the pattern",
        "spec.speculation.depth.max: 99 is above 16",
        "spec.speculation.method: 'magic' is none of "
        "['eagle3', 'peagle', 'dflash', 'eagle', 'draft-model', 'medusa', 'ngram', 'suffix', 'none']",
        "spec.workers.resources.limits.memory: does not match the pattern",
    ]


def schema_errors(value: Any, schema: dict[str, Any], path: str) -> Any:
    """Yield what the API server would refuse or prune, for the parts of a structural schema that the CRD uses."""
    types = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    if schema.get("x-kubernetes-int-or-string"):
        yield from _scalar_errors(value, schema if isinstance(value, int) else {"pattern": schema["pattern"]}, path)
    elif not isinstance(value, types[schema["type"]]):
        yield f"{path}: {value!r} is no {schema['type']}"
    elif isinstance(value, dict):
        yield from (f"{path}.{key}: missing" for key in schema.get("required", []) if key not in value)
        properties = schema.get("properties", {})
        for key, child in value.items():
            if key in properties:
                yield from schema_errors(child, properties[key], f"{path}.{key}")
            elif "additionalProperties" in schema:
                yield from schema_errors(child, schema["additionalProperties"], f"{path}.{key}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield f"{path}.{key}: unknown"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from schema_errors(item, schema["items"], f"{path}[{index}]")
    else:
        yield from _scalar_errors(value, schema, path)


def _scalar_errors(value: Any, schema: dict[str, Any], path: str) -> Any:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{path}: does not match the pattern"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{path}: {value} is below {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{path}: {value} is above {schema['maximum']}"


def test_crd_and_chart_copy_match_the_models(root: Path) -> None:
    command = [sys.executable, "-m", "specdecode_operator.api.crd", "--check", "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_charts_crd_renders_to_the_crd(chart: Any, root: Path) -> None:
    crds = [yaml.safe_load(crd_file.read_text()) for crd_file in sorted((root / "crds").glob("*.yaml"))]
    assert chart.template().of("CustomResourceDefinition") == crds
