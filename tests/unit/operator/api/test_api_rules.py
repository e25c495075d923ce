"""Rules of the resource stand twice, as CEL and as validators: both get the same examples here.

The CEL half asks a real API server, in server-side dry runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet import SPEC, deep
from kube import Cluster, KubectlError, wait_for
from pydantic import ValidationError

from specdecode_operator.api import crd
from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION, Spec, Status

ROOT = Path(__file__).parents[4]

GOOD: list[dict[str, Any]] = [
    {},
    {"speculation": {"method": "none", "draft": None}},
    {"speculation": {"depth": {"min": 2, "initial": 2, "max": 2}}},
    {"scaling": {"minReplicas": 2, "maxReplicas": 2}},
    {"storage": {"modelCache": {"pvc": "models"}}},
    {"workers": {"template": {"spec": {"anything": {"goes": [1]}}}, "resources": {"limits": {"cpu": "1"}}}},
    {"model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct@main"}},
    {"replicas": 0},
    {"speculation": {"tree": {"maxNodes": 4, "topK": 2}, "objective": {"itlMilliseconds": 20, "minSpeedup": 1.1}}},
    {"speculation": {"tasks": [{"name": "code", "mode": "Off"}, {"name": "sql", "depth": {"min": 2, "max": 8}}]}},
    {"workers": {"recycle": "OnCollapse"}},
    {"speculation": {"method": "ngram", "draft": None}},
    {
        "speculation": {
            "drafts": [{"name": "lookup", "method": "ngram"}, {"name": "sql", "method": "medusa", "uri": "file:///m"}],
            "tasks": [{"name": "edits", "draft": "lookup"}, {"name": "chat"}],
        }
    },
    {"workers": {"apiKeysSecretRef": {"name": "keys"}, "maxNumBatchedTokens": 2048}},
    {
        "model": {"quantization": "fp8"},
        "speculation": {
            "draft": {"uri": "file:///d", "quantization": "int4"},
            "drafts": [{"name": "other", "method": "draft-model", "uri": "file:///o", "quantization": "int8"}],
        },
    },
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"speculation": {"draft": None}}, "draft.uri is needed by every method but ngram and none"),
    ({"speculation": {"method": "none"}}, "draft.uri is needed by every method but ngram and none"),
    ({"speculation": {"depth": {"min": 4, "initial": 3, "max": 5}}}, "min <= initial <= max"),
    ({"speculation": {"depth": {"initial": 6}}}, "min <= initial <= max"),
    ({"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not exceed maxReplicas"),
    ({"storage": {"modelCache": {"pvc": "a", "hostPath": "/a"}}}, "not both"),
    ({"model": {"uri": "s3://bucket/model"}}, "uri"),
    ({"model": {"uri": "hf://no-organisation"}}, "uri"),
    ({"speculation": {"depth": {"max": 99}}}, "max"),
    ({"speculation": {"tasks": [{"name": "Not A Label"}]}}, "name"),
    ({"speculation": {"tasks": [{"name": f"t{i}"} for i in range(8)]}}, "tasks"),
    ({"speculation": {"tasks": [{"name": "a"}, {"name": "a"}]}}, "a name of its own"),
    ({"speculation": {"tasks": [{"name": "a", "depth": {"min": 3, "max": 2}}]}}, "a task's depth must satisfy"),
    ({"speculation": {"tasks": [{"name": "a", "depth": {"initial": 3, "max": 2}}]}}, "a task's depth must satisfy"),
    ({"speculation": {"tasks": [{"name": "a", "mode": "Advisory"}]}}, "mode"),
    ({"speculation": {"tree": {"maxNodes": 2}}}, "must not exceed tree.maxNodes"),
    ({"speculation": {"tree": {"topK": 9}}}, "top"),
    ({"speculation": {"objective": {"minSpeedup": 0.5}}}, "[mM]in_?[sS]peedup"),
    ({"speculation": {"hysteresis": {"maxChangesPerHour": 0}}}, "[mM]ax_?[cC]hanges"),
    ({"workers": {"recycle": "Always"}}, "recycle"),
    ({"speculation": {"method": "ngram"}}, "draft.uri is needed by every method but ngram and none"),
    ({"speculation": {"drafts": [{"name": "a", "method": "medusa"}]}}, "uri is needed by every method but ngram"),
    (
        {"speculation": {"drafts": [{"name": "a", "method": "ngram"}, {"name": "a", "method": "ngram"}]}},
        "every draft needs a name of its own",
    ),
    ({"speculation": {"tasks": [{"name": "code", "draft": "unknown"}]}}, "must be the name of one of"),
    ({"workers": {"maxNumSeqs": 0}}, "[mM]ax_?[nN]um_?[sS]eqs"),
    ({"replicas": -1}, "replicas"),
    ({"model": {"quantization": "int4"}}, "quantization"),
    ({"model": {"quantization": "fp8"}, "workers": {"tensorParallelSize": 2}}, "needs workers.tensorParallelSize 1"),
    (
        {"speculation": {"method": "medusa", "draft": {"uri": "file:///m", "quantization": "int4"}}},
        "quantization is for drafts of methods",
    ),
    (
        {"speculation": {"drafts": [{"name": "a", "method": "ngram", "quantization": "int4"}]}},
        "quantization is for drafts of methods",
    ),
]
TYPOS: list[dict[str, Any]] = [{"speculaton": {}}, {"speculation": {"dept": {"max": 2}}}, {"workers": {"gpus": 1}}]


def spec_with(change: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(_without_none(deep(SPEC, change))))  # type: ignore[no-any-return]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_good_specs_read(change: dict[str, Any]) -> None:
    Spec.model_validate(spec_with(change))


@pytest.mark.parametrize(("change", "words"), BAD, ids=str)
def test_validators_refuse(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Spec.model_validate(spec_with(change))


@pytest.mark.parametrize("change", TYPOS, ids=str)
def test_typos_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Spec.model_validate(spec_with(change))


def test_the_committed_crd_is_what_the_models_say() -> None:
    name = f"{PLURAL}.{GROUP}.yaml"
    assert (ROOT / "crds" / name).read_text() == crd.text(), "run `make crds`"


def test_status_has_a_schema_without_defaults() -> None:
    schema = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert "default" not in json.dumps(schema["properties"]["status"])
    assert set(schema["properties"]["status"]["properties"]) >= {"conditions", "speculation", "selector", "replicas"}
    Status.model_validate({"conditions": [], "replicas": 1})


# --- the same, by the API server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Cluster:
    """A cluster that knows our kind. The definition is shared, so it is added where missing and never removed."""
    name = f"{PLURAL}.{GROUP}"
    try:
        cluster.get("crd", name)
    except KubectlError:
        cluster.apply(yaml.safe_load(crd.text()))
    wait_for("our kind is served", lambda: cluster.kubectl("get", PLURAL, "--all-namespaces") is not None)
    return cluster


def manifest(change: dict[str, Any], name: str = "rules") -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": spec_with(change),
    }


def dry_run(api: Cluster, change: dict[str, Any], name: str = "rules") -> str:
    words = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    return api.kubectl(*words, namespace="default", stdin=json.dumps(manifest(change, name)))


@pytest.mark.cluster
@pytest.mark.parametrize("change", GOOD, ids=str)
def test_the_api_server_takes_good_specs(api: Cluster, change: dict[str, Any]) -> None:
    assert "created" in dry_run(api, change)


@pytest.mark.cluster
@pytest.mark.parametrize(("change", "words"), BAD, ids=str)
def test_the_api_server_refuses(api: Cluster, change: dict[str, Any], words: str) -> None:
    with pytest.raises(KubectlError, match=words):
        dry_run(api, change)


@pytest.mark.cluster
@pytest.mark.parametrize("change", TYPOS, ids=str)
def test_the_api_server_names_typos(api: Cluster, change: dict[str, Any]) -> None:
    with pytest.raises(KubectlError, match="unknown field"):
        dry_run(api, change)


@pytest.mark.cluster
def test_names_leave_room_for_suffixes(api: Cluster) -> None:
    with pytest.raises(KubectlError, match="at most 45 characters"):
        dry_run(api, {}, name="n" * 46)


@pytest.mark.cluster
def test_replicas_cannot_be_changed_while_the_operator_owns_them(api: Cluster, namespace: str) -> None:
    """The one rule over time: it needs an object that is there."""
    owned = manifest({"scaling": {"owner": "Operator"}}, "owned")
    api.apply(owned, namespace=namespace)
    with pytest.raises(KubectlError, match=r"scaling\.owner is Operator"):
        api.kubectl("scale", "sdd", "owned", "--replicas=3", namespace=namespace)
    external = manifest({"scaling": {"owner": "External"}}, "owned")
    api.apply(external, namespace=namespace)
    api.kubectl("scale", "sdd", "owned", "--replicas=3", namespace=namespace)
    scale = json.loads(
        api.kubectl("get", "--raw", f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/owned/scale")
    )
    assert scale["spec"]["replicas"] == 3
