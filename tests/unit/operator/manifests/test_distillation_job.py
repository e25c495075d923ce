"""The Job of a distillation: its pod, its labels, its queue and its retries."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import DEFAULTS, deployment_with

from specdecode_operator.manifests import identity
from specdecode_operator.manifests.distillation_job import (
    DEADLINE_MARGIN_SECONDS,
    DistillationJob,
    distillation_job,
    job_name,
)
from specdecode_operator.types import Manifest
from specdecode_worker.__main__ import main
from specdecode_worker.commands import distill
from specdecode_worker.contract import Env

BASE = {"run": "g3", "draft_uri": "hf://org/head", "golden_config_map": "demo-golden"}


def job(settings: dict[str, Any] | None = None, **spec: Any) -> Manifest:
    return distillation_job(deployment_with(**spec), DistillationJob(**{**BASE, **(settings or {})}), DEFAULTS)


def pod(settings: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return job(settings, **spec)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def container(settings: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    (only,) = pod(settings, **spec)["containers"]
    return only  # type: ignore[no-any-return]


def flags(settings: dict[str, Any] | None = None, **spec: Any) -> dict[str, str]:
    command = container(settings, **spec)["command"]
    assert command[:3] == ["specdecode-worker", "distill", "--job"]
    return dict(word.removeprefix("--").split("=", 1) for word in command[3:])


def volume(name: str, settings: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    (only,) = (one for one in pod(settings, **spec)["volumes"] if one["name"] == name)
    return only  # type: ignore[no-any-return]


def test_no_service_selects_the_pods_and_the_deployment_owns_the_job() -> None:
    made = job()
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == ("batch/v1", "Job", "demo-distill-g3")
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["controller"]) == ("SpecDecodeDeployment", True)
    for labels in (made["metadata"]["labels"], made["spec"]["template"]["metadata"]["labels"]):
        assert labels[identity.ROLE_LABEL] == "job"
        for selected in (identity.service_labels("demo"), identity.selector("demo"), identity.router_labels("demo")):
            assert not selected.items() <= labels.items()


def test_name_of_a_long_deployment_stays_a_label() -> None:
    long = job_name("a" * 60, "run-1")
    assert len(long) <= 63
    assert long != job_name("a" * 60, "run-2")
    assert job_name("demo", "1") == "demo-distill-1"


def test_queue_label_is_there_with_a_queue_alone_and_suspend_is_left_to_kueue() -> None:
    queued = job({"queue_name": "team-a"})
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "suspend" not in queued["spec"]
    assert "kueue.x-k8s.io/queue-name" not in job()["metadata"]["labels"]


def test_preemption_costs_no_retry_and_the_deadline_leaves_time_for_a_verdict() -> None:
    spec = job({"backoff_limit": 5, "time_limit_seconds": 3600})["spec"]
    ignored, usage = spec["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert usage["onExitCodes"]["values"] == [64]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (5, 3600 + DEADLINE_MARGIN_SECONDS)
    assert flags({"time_limit_seconds": 3600})["time-limit"] == "3600"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "needed by podFailurePolicy"


def test_pod_meets_the_restricted_pod_security_standard() -> None:
    made = pod()
    assert made["securityContext"]["runAsNonRoot"] is True
    assert made["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert made["automountServiceAccountToken"] is False
    for one in (*made["initContainers"], *made["containers"]):
        context = one["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
    kinds = {next(key for key in one if key != "name") for one in made["volumes"]}
    assert kinds <= {"emptyDir", "configMap", "secret", "persistentVolumeClaim"}


def test_scratch_is_a_bounded_folder_or_a_claim() -> None:
    assert volume("scratch", {"scratch_size": "9Gi"}) == {"name": "scratch", "emptyDir": {"sizeLimit": "9Gi"}}
    claimed = volume("scratch", {"scratch_claim": "drafts"})
    assert claimed["persistentVolumeClaim"] == {"claimName": "drafts"}
    assert flags()["out"].endswith("/g3"), "runs on one claim are kept apart"


def test_scheduling_and_devices_are_those_of_the_settings() -> None:
    wanted = {
        "node_selector": {"pool": "gpu"},
        "tolerations": ({"key": "gpu", "operator": "Exists"},),
        "priority_class_name": "low",
        "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}},
        "accelerators": 1,
        "accelerator_resource": "nvidia.com/mig-1g.10gb",
    }
    made = pod(wanted)
    assert made["nodeSelector"] == {"pool": "gpu"}
    assert made["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert made["priorityClassName"] == "low"
    resources = made["containers"][0]["resources"]
    assert resources == {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi", "nvidia.com/mig-1g.10gb": 1}}
    assert "nvidia.com/mig-1g.10gb" not in made["initContainers"][0]["resources"]["limits"]
    assert (flags(wanted)["device"], flags()["device"]) == ("cuda", "cpu")
    assert not {"nodeSelector", "tolerations", "priorityClassName"} & pod().keys()


def test_captures_are_pulled_from_all_workers_with_the_capture_token_alone() -> None:
    assert flags()["capture-from"] == "demo-workers.ns.svc:8001"
    env = {one["name"]: one for one in container()["env"]}
    assert env[Env.capture_token]["valueFrom"]["secretKeyRef"] == {"name": "demo-tokens", "key": "capture"}
    text = str(pod())
    assert text.count("demo-tokens") == 1, "no volume has the other tokens"


def test_with_tls_the_job_has_the_certificate_of_the_ca_and_no_key() -> None:
    spec = {"tls": {"secretName": "demo-tls"}}
    assert flags(**spec)["capture-from"] == "https://demo-workers.ns.svc:8001"
    assert flags(**spec)["capture-ca"] == "/etc/specdecode/tls/ca.crt"
    secret = volume("tls-ca", **spec)["secret"]
    assert (secret["secretName"], secret["items"]) == ("demo-tls", [{"key": "ca.crt", "path": "ca.crt"}])


def test_every_mount_has_its_volume() -> None:
    made = pod({"has_replay_prompts": True}, tls={"secretName": "t"})
    names = {one["name"] for one in made["volumes"]}
    for one in (*made["initContainers"], *made["containers"]):
        assert {mount["name"] for mount in one["volumeMounts"]} <= names
    assert made["initContainers"][0]["command"][-1] == "hf://org/head"


@pytest.mark.parametrize(
    "settings", [{}, {"has_replay_prompts": True, "steps": 50, "head_uri": "pvc://drafts/g3/head"}]
)
def test_command_line_is_one_that_distill_takes(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(distill, "run", lambda args: seen.append(args) or 0)
    assert main(container(settings)["command"][1:]) == 0
    (args,) = seen
    assert args.job
    assert args.steps == settings.get("steps", 2000)
    assert (args.replay_prompts is None) == (args.replay_share == 0)
