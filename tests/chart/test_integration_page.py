"""Check docs/how-to/integrate.md: YAML and Lua agree with chart and models, and flags of all pages with the chart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from lupa import lua51

from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION

HEALTH_KEY = f"resource.customizations.health.{GROUP}_{KIND}"
FOREIGN = {
    ("v1", "ConfigMap"),
    ("argoproj.io/v1alpha1", "Application"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("cert-manager.io/v1", "ClusterIssuer"),
    ("cert-manager.io/v1", "Certificate"),
}
"""Kinds of the page that are not ours. Their fields are compared with the projects' CRDs by hand."""


@pytest.fixture(scope="module")
def page(root: Any) -> str:
    return (root / "docs" / "how-to" / "integrate.md").read_text()  # type: ignore[no-any-return]


def documents(page: str) -> Iterator[dict[str, Any]]:
    """Yield every YAML document of the page."""
    for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        yield from yaml.safe_load_all(block)


def of_kind(page: str, kind: str) -> list[dict[str, Any]]:
    return [document for document in documents(page) if document.get("kind") == kind]


def test_every_document_is_of_a_known_kind(page: str) -> None:
    known = FOREIGN | {(f"{GROUP}/{VERSION}", KIND)}
    manifests = [document for document in documents(page) if "kind" in document]
    assert {(manifest["apiVersion"], manifest["kind"]) for manifest in manifests} == known
    assert all(manifest["metadata"]["name"] for manifest in manifests)


def test_values_of_the_pages_are_accepted_by_the_chart(chart: Any, root: Any) -> None:
    (policies,) = [one for one in documents((root / "docs/how-to/secure.md").read_text()) if "kind" not in one]
    (policy,) = chart.template(policies).of("NetworkPolicy")
    assert policy["spec"]["ingress"][1]["from"] == policies["networkPolicy"]["metricsFrom"]
    (fleet,) = [one for one in documents((root / "docs/how-to/install-upgrade.md").read_text()) if "worker" in one]
    assert chart.template(fleet).of("Deployment")


def test_flags_of_the_pages_are_accepted_by_the_chart(chart: Any, root: Any) -> None:
    texts = [path.read_text() for path in (root / "README.md", *(root / "docs").rglob("*.md"))]
    flags = {flag.strip("'") for text in texts for flag in re.findall(r"--set ('[^']+'|[^'\s`)]+)", text)}
    assert len(flags) >= 9
    for flag in sorted(flags):
        done = chart.try_template({}, "--set", flag)
        assert done.returncode == 0, f"{flag}: {done.stderr}"


def test_keda_scales_our_kind_and_queries_a_series_that_exists(page: str, root: Any) -> None:
    (scaled,) = of_kind(page, "ScaledObject")
    target = scaled["spec"]["scaleTargetRef"]
    (resource,) = [one for one in of_kind(page, KIND) if "scaling" in one["spec"]]
    assert resource["spec"]["scaling"]["owner"] == "External"
    assert target == {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": resource["metadata"]["name"]}
    (crd,) = (yaml.safe_load(path.read_text()) for path in (root / "crds").glob(f"{PLURAL}.*"))
    assert crd["spec"]["versions"][0]["subresources"]["scale"]["labelSelectorPath"]
    (trigger,) = scaled["spec"]["triggers"]
    (series,) = re.findall(r"specdecode_\w+", trigger["metadata"]["query"])
    assert f"`{series}`" in (root / "docs" / "reference" / "metrics.md").read_text()


def test_the_certificate_is_the_one_that_workers_serve(page: str) -> None:
    issuers = {issuer["metadata"]["name"]: issuer for issuer in of_kind(page, "ClusterIssuer")}
    authority, leaf = of_kind(page, "Certificate")
    (resource,) = [one for one in of_kind(page, KIND) if "tlsSecretRef" in one["spec"]]
    assert resource["spec"]["tlsSecretRef"]["name"] == leaf["spec"]["secretName"]
    assert f"{resource['metadata']['name']}.{resource['metadata']['namespace']}.svc" in leaf["spec"]["dnsNames"]
    assert issuers[leaf["spec"]["issuerRef"]["name"]]["spec"]["ca"]["secretName"] == authority["spec"]["secretName"]
    assert authority["spec"]["isCA"] is True
    assert "selfSigned" in issuers[authority["spec"]["issuerRef"]["name"]]["spec"]


def condition(kind: str, status: str, reason: str = "Reason", message: str = "message") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


READY, NOT_READY = condition("Ready", "True"), condition("Ready", "False", "RollingOut")
CASES: dict[str, tuple[dict[str, Any] | None, str]] = {
    "no status yet": (None, "Progressing"),
    "an older generation": ({"observedGeneration": 1, "conditions": [READY]}, "Progressing"),
    "no conditions": ({"observedGeneration": 2}, "Progressing"),
    "ready": ({"observedGeneration": 2, "conditions": [READY]}, "Healthy"),
    "ready while something scales": (
        {"observedGeneration": 2, "conditions": [condition("Available", "True"), READY]},
        "Healthy",
    ),
    "rolling out": (
        {"observedGeneration": 2, "conditions": [NOT_READY, condition("Reconciling", "True")]},
        "Progressing",
    ),
    "stalled": (
        {"observedGeneration": 2, "conditions": [NOT_READY, condition("Stalled", "True", "ChildRefused")]},
        "Degraded",
    ),
    "stalled and paused": (
        {
            "observedGeneration": 2,
            "conditions": [condition("Progressing", "Unknown", "Paused"), condition("Stalled", "True")],
        },
        "Degraded",
    ),
    "paused": (
        {"observedGeneration": 2, "conditions": [NOT_READY, condition("Progressing", "Unknown", "Paused")]},
        "Suspended",
    ),
    "a message is absent": (
        {"observedGeneration": 2, "conditions": [{"type": "Ready", "status": "False", "reason": "Scaling"}]},
        "Progressing",
    ),
}


@pytest.mark.parametrize(("status", "health"), CASES.values(), ids=CASES)
def test_argo_cd_health(page: str, status: dict[str, Any] | None, health: str) -> None:
    """Argo CD runs Lua 5.1, with the resource in `obj`."""
    runtime = lua51.LuaRuntime()
    (config,) = of_kind(page, "ConfigMap")
    resource = {"metadata": {"generation": 2}, **({"status": status} if status else {})}
    runtime.globals().obj = runtime.table_from(resource, recursive=True)
    answer = runtime.execute(config["data"][HEALTH_KEY])
    assert answer.status == health
    assert answer.message
    if health == "Degraded":
        assert answer.message.startswith(status["conditions"][-1]["reason"])  # type: ignore[index]
