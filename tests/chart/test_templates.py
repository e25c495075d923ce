"""Properties of the manifests that the chart installs."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from specdecode_operator.settings import PREFIX, read_settings


def pods(rendered: Any) -> list[dict[str, Any]]:
    return [rendered.one("Deployment")["spec"]["template"]["spec"], *(pod["spec"] for pod in rendered.of("Pod"))]


def environment(rendered: Any) -> dict[str, str]:
    (container,) = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: _literal(variable) for variable in container["env"]}


def _literal(variable: dict[str, Any]) -> str:
    """Return the value of a variable, with the values that the downward API gives the first pod of release `sd`."""
    pod = {"metadata.namespace": "sys", "metadata.name": "sd-specdecode-7d9f-x2x4z"}
    return variable["value"] if "value" in variable else pod[variable["valueFrom"]["fieldRef"]["fieldPath"]]  # type: ignore[no-any-return]


def test_lint_is_clean(chart: Any) -> None:
    done = chart.helm("lint", "--strict", str(chart.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_every_pod_fits_the_restricted_standard(chart: Any) -> None:
    specs = pods(chart.template())
    assert len(specs) == 2, "the operator and the pod of helm test"
    for pod in specs:
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == 65532
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


def test_the_operator_reads_every_variable_it_is_given(chart: Any) -> None:
    values = {
        "worker": {"image": "registry.example/worker:1", "imagePullPolicy": "Always"},
        "watchNamespaces": ["a", "b"],
        "pollSeconds": 2.5,
        "concurrency": 2,
        "logLevel": "debug",
    }
    variables = environment(chart.template(values))
    settings = read_settings(variables)
    assert settings.worker_image == "registry.example/worker:1"
    assert settings.worker_image_pull_policy == "Always"
    assert settings.watch_namespaces == ("a", "b")
    assert (settings.poll_seconds, settings.concurrency, settings.log_level) == (2.5, 2, "debug")
    fields = {name.removeprefix(PREFIX).lower() for name in variables}
    assert fields <= set(type(settings).model_fields)


def test_ports_of_the_pod_are_the_ports_the_operator_listens_on(chart: Any) -> None:
    rendered = chart.template()
    settings = read_settings(environment(rendered))
    (container,) = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"health": settings.port_health, "metrics": settings.port_metrics}


def test_image_and_scheduling_values_are_applied(chart: Any) -> None:
    values = {
        "image": {"repository": "registry.example/operator", "tag": "v2", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"note": "1"},
        "resources": {"limits": {"memory": "1Gi"}},
    }
    rendered = chart.template(values)
    template = rendered.one("Deployment")["spec"]["template"]
    assert template["metadata"]["annotations"] == {"note": "1"}
    assert template["spec"]["affinity"] == {"nodeAffinity": {}}
    for pod in pods(rendered):
        assert pod["containers"][0]["image"] == "registry.example/operator:v2"
        assert pod["containers"][0]["imagePullPolicy"] == "Always"
        assert pod["imagePullSecrets"] == [{"name": "pull"}]
        assert pod["nodeSelector"] == {"disk": "ssd"}
        assert pod["tolerations"] == [{"key": "a", "operator": "Exists"}]
    assert template["spec"]["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}


def test_the_metrics_service_selects_the_operator_and_nothing_else(chart: Any) -> None:
    rendered = chart.template()
    selector = rendered.one("Service")["spec"]["selector"].items()
    assert selector <= rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert not any(selector <= pod["metadata"]["labels"].items() for pod in rendered.of("Pod"))


def test_service_monitor_is_off_by_default(chart: Any) -> None:
    assert not chart.template().of("ServiceMonitor")
    asked = {"metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "p"}}}}
    assert chart.template(asked).one("ServiceMonitor")["metadata"]["labels"]["release"] == "p"
    assert not chart.template({"metrics": {"enabled": False}}).of("Service")


def test_crd_survives_uninstall_and_can_be_disabled(chart: Any) -> None:
    crd = chart.template().one("CustomResourceDefinition")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not chart.template({"crds": {"enabled": False}}).of("CustomResourceDefinition")


def test_two_releases_share_no_cluster_scoped_name(chart: Any) -> None:
    def names(namespace: str) -> set[tuple[str, str]]:
        rendered = chart.template({"crds": {"enabled": False}}, "--namespace", namespace)
        cluster_scoped = ("ClusterRole", "ClusterRoleBinding")
        return {(m["kind"], m["metadata"]["name"]) for m in rendered if m["kind"] in cluster_scoped}

    assert len(names("one")) == 2
    assert not names("one") & names("two")


@pytest.mark.parametrize("watched", [[], ["team-a", "team-b"]], ids=["all namespaces", "two namespaces"])
def test_notes_name_the_namespaces_and_next_steps(chart: Any, tmp_path: Any, watched: list[str]) -> None:
    """The notes name the endpoint and the next steps.

    helm prints NOTES only on installation, so the test renders them as the text of a manifest.
    """
    shutil.copytree(chart.folder, tmp_path / "chart")
    templates = tmp_path / "chart" / "templates"
    notes = (templates / "NOTES.txt").read_text()
    (templates / "NOTES.txt").unlink()
    (templates / "notes.yaml").write_text(
        '{{- define "notes" -}}' + notes + '{{- end -}}\nkind: Notes\ntext: {{ include "notes" . | quote }}\n'
    )
    chart.folder = tmp_path / "chart"
    (rendered_notes,) = chart.template({"watchNamespaces": watched}, "--show-only", "templates/notes.yaml")
    assert ("team-a, team-b" if watched else "every namespace") in rendered_notes["text"]
    assert "deployment/sd-specdecode" in rendered_notes["text"]
    assert "kubectl get sdd" in rendered_notes["text"]
