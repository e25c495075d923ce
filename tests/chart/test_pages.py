"""Facts in README and docs/: generated parts are fresh, links hold, messages, specs and commands are the code's."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import lua51
from prometheus_client.metrics import MetricWrapperBase

from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION, Spec
from specdecode_operator.manifests import router_name
from specdecode_operator.plugin.cli import _parser as plugin_parser
from specdecode_router.telemetry.metrics import RouterMetrics
from specdecode_worker.commands.arguments import COMMANDS, new_parser
from support.kube import ROOT

PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = ("operator", "router", "worker", "helm", "hack", "simulator", "benchmarks")


def test_a_stale_part_and_a_broken_link_are_found(tmp_path: Path) -> None:
    for name in ("docs", "helm", "operator", "router", "worker", "simulator"):
        (tmp_path / name).symlink_to(ROOT / name) if name != "docs" else (tmp_path / "docs").mkdir()
    (tmp_path / "hack").mkdir()
    (tmp_path / "hack" / "docs").write_text((ROOT / "hack" / "docs").read_text())
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for name in ("ARCHITECTURE.md", "README.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("# Title\n\n[gone](docs/none.md) [no heading](README.md#none)\n")
    page = (ROOT / "docs" / "reference" / "helm-values.md").read_text()
    (tmp_path / "docs" / "helm-values.md").write_text(page.replace("`pollSeconds` | `5`", "`pollSeconds` | `6`"))
    done = subprocess.run([sys.executable, "hack/docs", "--check"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "helm-values.md is stale" in done.stderr
    assert "README.md: docs/none.md" in done.stderr
    assert "README.md: README.md#none" in done.stderr


@pytest.fixture(scope="module")
def source() -> str:
    """Return all text of the code, with string literals joined, as it is and with placeholders as dots."""
    files = [
        path for name in CODE for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".tpl", ".yaml", ".txt")
    ]
    files += [path for path in (ROOT / "hack").iterdir() if path.is_file()]
    text = "\n".join(path.read_text(errors="replace") for path in files)
    text = re.sub(r"[\"']\s*\n\s*[rf]*[\"']", "", text)
    filled = re.sub(r"\{[^{}]*\}|%[sd]", "...", text)
    return re.sub(r"\s+", " ", (text + filled).replace("\\", ""))


FOREIGN = (
    "exists and cannot be imported into the current release",
    "Additional property",
    "attempting to grant RBAC permissions not currently held",
    "certificate verify failed",
    "OOMKilled",
    "out of time",
)
"""Messages of Helm, Kubernetes and Python."""


def quoted_messages() -> Iterator[tuple[str, str]]:
    """Yield page and message of the tables whose first column is what a user sees."""
    for page in PAGES:
        for block in re.split(r"\n\n", page.read_text()):
            if re.match(r"\| (you see|message|REASON or message|answer) \|", block):
                for row in block.splitlines()[2:]:
                    for message in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                        if " " in message and not message.startswith(("kubectl", "pinned")):
                            yield page.name, message


def test_quoted_messages_are_in_the_code(source: str) -> None:
    found = list(quoted_messages())
    assert len(found) >= 20
    missing = []
    for page, message in found:
        parts = [part.strip() for part in re.split(r"\.\.\.|\b[A-Z-]{3,}[a-z-]*\b|\bN\b|\b\d+\b|: ", message)]
        if not message.startswith(FOREIGN) and not all(part in source for part in parts if len(part) > 3):
            missing.append((page, message))
    assert missing == []


def documents(page: str) -> Iterator[dict[str, Any]]:
    """Yield every YAML document of a page."""
    for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        yield from yaml.safe_load_all(block)


@pytest.mark.parametrize(
    ("page", "document"),
    [(page.name, document) for page in PAGES for document in documents(page.read_text())],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_spec_of_a_page_is_valid(page: str, document: dict[str, Any]) -> None:
    if document.get("kind") not in (None, "SpecDecodeDeployment"):
        return
    least = {"model": {"uri": "hf://org/model"}, "speculation": {"method": "ngram"}}
    spec = document.get("spec")
    if spec is None and document.keys() <= Spec.model_json_schema()["properties"].keys():
        spec = document
    if spec is None:
        return  # values of the chart
    merged = {**least, **spec}
    if "uri" not in merged["model"]:
        merged["model"] = {**least["model"], **merged["model"]}
    speculation = merged["speculation"]
    if not {"method", "draft"} & speculation.keys():
        merged["speculation"] = {**least["speculation"], **speculation}
    Spec.model_validate(merged, extra="forbid")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield page and words of every worker and plugin command in the code blocks of the pages."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for line in re.findall(r"^(?:    |\$ )(.*)$", text, re.MULTILINE):
            line = re.split(r"\s+#|\s+[|<>;&]", line)[0]
            found = re.search(r"(?:(specdecode-worker) (\w+)|kubectl (specdecode) (\w+))(.*)", line)
            if found and (found[2] in COMMANDS or found[3]):
                try:
                    words = shlex.split(found[0])
                except ValueError:
                    continue
                yield page.name, words


@pytest.mark.parametrize(
    ("page", "words"), list(commands()), ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else value
)
def test_every_command_of_a_page_parses(page: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "..." in words:
        words = [word for word in words if word != "..."]
    parser = plugin_parser() if words[0] == "kubectl" else new_parser(words[1])
    try:
        parser.parse_args(words[2:])
    except SystemExit:
        error = capsys.readouterr().err.splitlines()[-1]
        assert "required" in error, f"{page}: {' '.join(words)}: {error}"  # a line that shows a part of a command


# Check docs/how-to/integrate.md: YAML and Lua agree with chart and models, and flags of all pages with the chart.


HEALTH_KEY = f"resource.customizations.health.{GROUP}_{KIND}"
INTEGRATION_PAGE_FOREIGN = {
    ("v1", "ConfigMap"),
    ("argoproj.io/v1alpha1", "Application"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("cert-manager.io/v1", "ClusterIssuer"),
    ("cert-manager.io/v1", "Certificate"),
}
"""Kinds of the page that are not ours. Their fields are compared with the projects' CRDs by hand."""


INTEGRATION = list(documents((ROOT / "docs/how-to/integrate.md").read_text()))


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for document in INTEGRATION if document.get("kind") == kind]


def test_every_document_is_of_a_known_kind() -> None:
    known = INTEGRATION_PAGE_FOREIGN | {(f"{GROUP}/{VERSION}", KIND)}
    manifests = [document for document in INTEGRATION if "kind" in document]
    assert {(manifest["apiVersion"], manifest["kind"]) for manifest in manifests} == known
    assert all(manifest["metadata"]["name"] for manifest in manifests)


def test_values_of_the_pages_are_accepted_by_the_chart(chart: Any) -> None:
    (policies,) = [one for one in documents((ROOT / "docs/how-to/secure.md").read_text()) if "kind" not in one]
    (policy,) = chart.template(policies).of("NetworkPolicy")
    assert policy["spec"]["ingress"][1]["from"] == policies["networkPolicy"]["metricsFrom"]
    (fleet,) = [one for one in documents((ROOT / "docs/how-to/install-upgrade.md").read_text()) if "worker" in one]
    assert chart.template(fleet).of("Deployment")


def test_flags_of_the_pages_are_accepted_by_the_chart(chart: Any) -> None:
    texts = [path.read_text() for path in PAGES]
    flags = {flag.strip("'") for text in texts for flag in re.findall(r"--set ('[^']+'|[^'\s`)]+)", text)}
    assert len(flags) >= 9
    for flag in sorted(flags):
        done = chart.try_template({}, "--set", flag)
        assert done.returncode == 0, f"{flag}: {done.stderr}"


def test_keda_scales_our_kind_and_queries_a_series_that_exists() -> None:
    (scaled,) = of_kind("ScaledObject")
    target = scaled["spec"]["scaleTargetRef"]
    (resource,) = [one for one in of_kind(KIND) if "scaling" in one["spec"]]
    assert resource["spec"]["scaling"]["owner"] == "External"
    assert target == {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": resource["metadata"]["name"]}
    (crd,) = (yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob(f"{PLURAL}.*"))
    assert crd["spec"]["versions"][0]["subresources"]["scale"]["labelSelectorPath"]
    (trigger,) = scaled["spec"]["triggers"]
    (series,) = re.findall(r"specdecode_\w+", trigger["metadata"]["query"])
    assert f"`{series}`" in (ROOT / "docs" / "reference" / "metrics.md").read_text()


def test_the_certificate_is_the_one_that_workers_serve() -> None:
    issuers = {issuer["metadata"]["name"]: issuer for issuer in of_kind("ClusterIssuer")}
    authority, leaf = of_kind("Certificate")
    (resource,) = [one for one in of_kind(KIND) if "tlsSecretRef" in one["spec"]]
    assert resource["spec"]["tlsSecretRef"]["name"] == leaf["spec"]["secretName"]
    assert f"{resource['metadata']['name']}.{resource['metadata']['namespace']}.svc" in leaf["spec"]["dnsNames"]
    assert issuers[leaf["spec"]["issuerRef"]["name"]]["spec"]["ca"]["secretName"] == authority["spec"]["secretName"]
    assert authority["spec"]["isCA"] is True
    assert "selfSigned" in issuers[authority["spec"]["issuerRef"]["name"]]["spec"]


def condition(kind: str, status: str, reason: str = "Reason") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": "message"}


def status(*conditions: dict[str, str], generation: int = 2) -> dict[str, Any]:
    return {"observedGeneration": generation, "conditions": list(conditions)}


READY, NOT_READY = condition("Ready", "True"), condition("Ready", "False", "RollingOut")
PAUSED = condition("Progressing", "Unknown", "Paused")
CASES: dict[str, tuple[dict[str, Any] | None, str]] = {
    "no status yet": (None, "Progressing"),
    "an older generation": (status(READY, generation=1), "Progressing"),
    "no conditions": ({"observedGeneration": 2}, "Progressing"),
    "ready": (status(READY), "Healthy"),
    "ready while something scales": (status(condition("Available", "True"), READY), "Healthy"),
    "rolling out": (status(NOT_READY, condition("Reconciling", "True")), "Progressing"),
    "stalled": (status(NOT_READY, condition("Stalled", "True", "ChildRefused")), "Degraded"),
    "stalled and paused": (status(PAUSED, condition("Stalled", "True")), "Degraded"),
    "paused": (status(NOT_READY, PAUSED), "Suspended"),
    "a message is absent": (status({"type": "Ready", "status": "False", "reason": "Scaling"}), "Progressing"),
}


@pytest.mark.parametrize(("shown", "health"), CASES.values(), ids=CASES)
def test_argo_cd_health(shown: dict[str, Any] | None, health: str) -> None:
    """Argo CD runs Lua 5.1, with the resource in `obj`."""
    runtime = lua51.LuaRuntime()
    (config,) = of_kind("ConfigMap")
    resource = {"metadata": {"generation": 2}, **({"status": shown} if shown else {})}
    runtime.globals().obj = runtime.table_from(resource, recursive=True)
    answer = runtime.execute(config["data"][HEALTH_KEY])
    assert answer.status == health
    assert answer.message
    if health == "Degraded":
        assert answer.message.startswith(shown["conditions"][-1]["reason"])  # type: ignore[index]


# Check the manifests in route-traffic.md and scale.md: they are valid and name what operator and routers make.


def test_the_autoscaler_of_the_page_follows_an_exported_gauge() -> None:
    text = "".join((ROOT / "docs" / "how-to" / name).read_text() for name in ("route-traffic.md", "scale.md"))
    (scaler,) = [block for block in documents(text) if block.get("kind") == "HorizontalPodAutoscaler"]
    assert scaler["apiVersion"] == "autoscaling/v2"
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"], target["name"]) == ("apps/v1", "Deployment", router_name("llama"))
    (metric,) = scaler["spec"]["metrics"]
    gauges = {one._name for one in vars(RouterMetrics()).values()
              if isinstance(one, MetricWrapperBase) and one._type == "gauge"}  # fmt: skip
    assert metric["pods"]["metric"]["name"] in gauges
    assert metric["pods"]["target"]["type"] == "AverageValue"


def test_patches_of_the_page_are_valid() -> None:
    example = yaml.safe_load((ROOT / "examples" / "router.yaml").read_text())["spec"]
    text = (ROOT / "docs" / "how-to" / "route-traffic.md").read_text()
    patches = [yaml.safe_load(patch) for patch in re.findall(r"-p (?:\\\n\s*)?'(\{.*?\})'", text)]
    assert len(patches) >= 2
    for patch in patches:
        router = {**example["router"], **patch["spec"]["router"]}
        Spec.model_validate({**example, "router": router, "scaling": {"minReplicas": 1}}, extra="forbid")
