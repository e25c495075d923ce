"""Properties of the manifests that the chart installs."""

from __future__ import annotations

import shutil
from dataclasses import fields
from typing import Any

import pytest
import yaml

from specdecode_operator.errors import SpecError
from specdecode_operator.manifests import distillation_job, pod_template, router_workload
from specdecode_operator.settings import PREFIX, read_settings
from specdecode_operator.types import Defaults
from support.operators.fleet import RUN, deployment_of

LEAST = {"model": {"uri": "hf://org/target"}}


def pods(rendered: Any) -> list[dict[str, Any]]:
    return [rendered.pod["spec"], *(pod["spec"] for pod in rendered.of("Pod"))]


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
    variables = chart.template(values).environment
    settings = read_settings(variables)
    assert settings.worker_image == "registry.example/worker:1"
    assert settings.worker_image_pull_policy == "Always"
    assert settings.watch_namespaces == ("a", "b")
    assert (settings.poll_seconds, settings.concurrency, settings.log_level) == (2.5, 2, "debug")
    fields = {name.removeprefix(PREFIX).lower() for name in variables}
    assert fields <= set(type(settings).model_fields)


def test_ports_of_the_pod_are_the_ports_the_operator_listens_on(chart: Any) -> None:
    rendered = chart.template()
    settings = read_settings(rendered.environment)
    ports = {port["name"]: port["containerPort"] for port in rendered.container["ports"]}
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
    assert rendered.pod["metadata"]["annotations"] == {"note": "1"}
    assert rendered.pod["spec"]["affinity"] == {"nodeAffinity": {}}
    for pod in pods(rendered):
        assert pod["containers"][0]["image"] == "registry.example/operator:v2"
        assert pod["containers"][0]["imagePullPolicy"] == "Always"
        assert pod["imagePullSecrets"] == [{"name": "pull"}]
        assert pod["nodeSelector"] == {"disk": "ssd"}
        assert pod["tolerations"] == [{"key": "a", "operator": "Exists"}]
    assert rendered.container["resources"]["limits"] == {"memory": "1Gi"}


def test_images_are_of_the_charts_version_unless_a_tag_or_a_digest_is_named(chart: Any) -> None:
    version = yaml.safe_load((chart.folder / "Chart.yaml").read_text())["appVersion"]
    settings = read_settings(chart.template().environment)
    assert settings.router_image == f"localhost/specdecode-operator:{version}"
    assert settings.worker_image == f"localhost/specdecode-worker:{version}"
    digest = "sha256:" + "a" * 64
    for image in (f"r.example:5000/worker@{digest}", "r.example:5000/worker:1"):
        rendered = chart.template(
            {"image": {"repository": "r.example/op", "digest": digest}, "worker": {"image": image}}
        )
        assert read_settings(rendered.environment).worker_image == image
        assert [pod["containers"][0]["image"] for pod in pods(rendered)] == [f"r.example/op@{digest}"] * 2
    port = chart.template({"worker": {"image": "r.example:5000/worker"}})
    assert read_settings(port.environment).worker_image == f"r.example:5000/worker:{version}"


def test_defaults_of_a_fleet_reach_the_pods_of_every_deployment(chart: Any) -> None:
    """Pods of workers, training Jobs and routers have them where the deployment names no others."""
    template = {
        "metadata": {"labels": {"team": "ml"}},
        "spec": {
            "imagePullSecrets": [{"name": "registry"}],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "nodeSelector": {"pool": "gpu"},
            "runtimeClassName": "nvidia",
            "containers": [{"name": "worker", "env": [{"name": "HTTPS_PROXY", "value": "http://p:1"}]}],
        },
    }
    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    workers = {"template": template, "modelCache": claim, "tokenSecretRef": {"name": "hub"}}
    routers = {"template": {"spec": {"priorityClassName": "high"}}}
    rendered = chart.template({"worker": workers, "router": routers})
    defaults = defaults_of(rendered)
    deployment = deployment_of(LEAST)
    job = distillation_job(deployment, RUN, defaults)["spec"]["template"]
    for pod, container in ((pod_template(deployment, defaults), "worker"), (job, "distill")):
        assert pod["metadata"]["labels"]["team"] == "ml"
        spec = pod["spec"]
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert (spec["nodeSelector"], spec["runtimeClassName"]) == ({"pool": "gpu"}, "nvidia")
        assert {"name": "model-cache", **claim} in spec["volumes"]
        containers = {one["name"]: one for one in (*spec["initContainers"], *spec["containers"])}
        assert containers.keys() == {"pull", container}
        for one in containers.values():
            assert {"name": "HTTPS_PROXY", "value": "http://p:1"} in one["env"]
        (token,) = [one for one in containers["pull"]["env"] if one["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token", "optional": True}
        assert "SPECDECODE_CACHE_LIMIT" not in {one["name"] for one in containers["pull"]["env"]}
    router = router_workload(deployment, defaults)["spec"]["template"]["spec"]
    assert router["priorityClassName"] == "high"
    assert "tolerations" not in router


def test_a_deployment_has_the_last_word_over_the_fleet(chart: Any) -> None:
    fleet = {"spec": {"nodeSelector": {"pool": "gpu"}, "runtimeClassName": "nvidia"}}
    defaults = defaults_of(chart.template({"worker": {"template": fleet, "tokenSecretRef": {"name": "hub"}}}))
    own = {
        "model": {"uri": "hf://org/target", "tokenSecretRef": {"name": "mine"}},
        "workers": {"template": {"spec": {"nodeSelector": {"pool": "big"}, "runtimeClassName": None}}},
        "modelCache": {"emptyDir": {"sizeLimit": "2Ti"}},
    }
    spec = pod_template(deployment_of(own), defaults)["spec"]
    assert spec["nodeSelector"] == {"pool": "big"}
    assert "runtimeClassName" not in spec
    assert {"name": "model-cache", "emptyDir": {"sizeLimit": "2Ti"}} in spec["volumes"]
    env = {one["name"]: one for one in spec["initContainers"][0]["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "token"}
    assert env["SPECDECODE_CACHE_LIMIT"]["value"] == f"{2 << 40} /var/cache/specdecode"


def test_a_model_cache_of_nobody_has_a_limit(chart: Any) -> None:
    spec = pod_template(deployment_of(LEAST), defaults_of(chart.template()))["spec"]
    assert {"name": "model-cache", "emptyDir": {"sizeLimit": "64Gi"}} in spec["volumes"]
    env = {one["name"]: one.get("value") for one in spec["initContainers"][0]["env"]}
    assert env["SPECDECODE_CACHE_LIMIT"] == f"{64 << 30} /var/cache/specdecode"


def test_a_fleets_template_that_cannot_be_merged_is_named(chart: Any) -> None:
    for bad, place in (
        ({"spec": {"containers": {"a": 1}}}, "worker.template.spec.containers must be a list"),
        ({"spec": {"containers": [{"name": "worker", "env": [{"name": "SPECDECODE_CONFIG"}]}]}}, "must not set"),
    ):
        defaults = defaults_of(chart.template({"worker": {"template": bad}}))
        with pytest.raises(SpecError, match=f"the operator's setting worker.template.*{place}|{place}"):
            pod_template(deployment_of(LEAST), defaults)


def test_further_settings_of_the_operators_pods(chart: Any) -> None:
    values = {
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://p:1"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        "podSecurityContext": {"runAsUser": 1000, "supplementalGroups": [5]},
        "securityContext": {"readOnlyRootFilesystem": False},
        "commonLabels": {"cost-center": "42"},
    }
    rendered = chart.template({**values, "watchNamespaces": ["a"]})
    pod, container = rendered.pod["spec"], rendered.container
    assert {"name": "HTTPS_PROXY", "value": "http://p:1"} in container["env"]
    assert values["extraVolumes"][0] in pod["volumes"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["supplementalGroups"]) == (1000, [5])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for manifest in rendered:
        if manifest["kind"] != "CustomResourceDefinition":
            assert manifest["metadata"]["labels"]["cost-center"] == "42", manifest["kind"]


def test_a_label_that_chart_and_user_name_is_there_once(chart: Any) -> None:
    """The user's value wins, but for labels of pods by which they are selected."""
    common = {"app.kubernetes.io/part-of": "ml", "app.kubernetes.io/name": "mine"}
    further = {"enabled": True, "labels": {"app.kubernetes.io/instance": "prometheus"}}
    metrics = dict.fromkeys(("serviceMonitor", "podMonitor", "rules", "dashboard"), further)
    rendered = chart.template({"commonLabels": common, "podLabels": common, "metrics": metrics})
    selector = rendered.one("Deployment")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= rendered.pod["metadata"]["labels"].items()
    for manifest in (*rendered, rendered.pod):
        if manifest.get("kind") != "CustomResourceDefinition":
            assert manifest["metadata"]["labels"]["app.kubernetes.io/part-of"] == "ml", manifest
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"):
        assert rendered.one(kind)["metadata"]["labels"]["app.kubernetes.io/instance"] == "prometheus"


def defaults_of(rendered: Any) -> Defaults:
    """Return the defaults of the operator of a rendered chart."""
    settings = read_settings(rendered.environment)
    return Defaults(**{field.name: getattr(settings, field.name) for field in fields(Defaults)})


def test_the_metrics_service_selects_the_operator_and_nothing_else(chart: Any) -> None:
    rendered = chart.template()
    selector = rendered.one("Service")["spec"]["selector"].items()
    assert selector <= rendered.pod["metadata"]["labels"].items()
    assert not any(selector <= pod["metadata"]["labels"].items() for pod in rendered.of("Pod"))
    assert not chart.template({"metrics": {"enabled": False}}).of("Service")


def test_crd_survives_uninstall_and_can_be_disabled(chart: Any) -> None:
    crds = chart.template().of("CustomResourceDefinition")
    assert [crd["metadata"]["annotations"]["helm.sh/resource-policy"] for crd in crds] == ["keep", "keep"]
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
    """Helm prints NOTES only on installation, so the test renders them as the text of a manifest."""
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


# Checks that the chart runs two operators of which one leads, and that an upgrade or a drain leaves one running.


def test_two_operators_roll_without_a_gap(chart: Any) -> None:
    spec = chart.template().one("Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_every_operator_takes_part_in_the_election(chart: Any) -> None:
    for values in ({}, {"replicas": 1}):
        settings = read_settings(chart.template(values).environment)
        assert settings.leader_election
        assert (settings.namespace, settings.lease_name) == ("sys", "sd-specdecode")
        assert settings.identity == "sd-specdecode-7d9f-x2x4z", "the pod's name"


def test_two_releases_of_one_namespace_use_two_leases(chart: Any) -> None:
    one, two = (chart.template({"fullnameOverride": name}).environment for name in ("specdecode-a", "specdecode-b"))
    assert read_settings(one).lease_name != read_settings(two).lease_name


def test_an_operator_that_is_not_ready_yet_is_left_alive(chart: Any) -> None:
    probes = chart.template().container
    paths = {name: probes[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/healthz", "readiness": "/ready", "liveness": "/healthz"}


def test_the_budget_lets_one_operator_go_and_blocks_no_drain(chart: Any) -> None:
    rendered = chart.template()
    spec = rendered.one("PodDisruptionBudget")["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    selector = spec["selector"]["matchLabels"].items()
    assert selector <= rendered.pod["metadata"]["labels"].items()
    assert not any(selector <= pod["metadata"]["labels"].items() for pod in rendered.of("Pod"))


def test_no_budget_for_a_single_operator(chart: Any) -> None:
    off = {"podDisruptionBudget": {"enabled": False}}
    for values in ({"replicas": 1}, {"replicas": 0}, off):
        assert not chart.template(values).of("PodDisruptionBudget")


def test_replicas_prefer_different_nodes(chart: Any) -> None:
    rendered = chart.template()
    (term,) = rendered.pod["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels == rendered.one("Deployment")["spec"]["selector"]["matchLabels"]


def test_the_workers_authority_is_mounted_as_a_folder_without_keys(chart: Any) -> None:
    """The Secret of an authority may have its private key: only the certificate is mounted."""
    rendered = chart.template({"worker": {"caSecret": "worker-ca"}})
    (volume,) = [v for v in rendered.pod["spec"]["volumes"] if "secret" in v]
    assert volume["secret"] == {"secretName": "worker-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    (mount,) = [m for m in rendered.container["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["readOnly"] is True
    assert "subPath" not in mount, "the kubelet updates folders only"
    assert rendered.environment[f"{PREFIX}WORKER_CA"] == f"{mount['mountPath']}/ca.crt"


def test_without_an_authority_nothing_is_mounted(chart: Any) -> None:
    rendered = chart.template()
    assert f"{PREFIX}WORKER_CA" not in rendered.environment
    assert [volume["name"] for volume in rendered.pod["spec"]["volumes"]] == ["tmp"]
