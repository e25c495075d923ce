"""The Jobs of a distillation and of the deletion of its run: pods, labels, queue, retries, and drafts in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.errors import SpecError
from specdecode_operator.manifests import objects, rolling_hash
from specdecode_operator.manifests.jobs import (
    DEADLINE_MARGIN_SECONDS,
    GRACE_SECONDS,
    RUN_LABEL,
    check_job_template,
    deletion_job,
    deletion_job_name,
    distillation_job,
    job_name,
)
from specdecode_operator.manifests.pods import bucket_environment, pod_template
from specdecode_operator.rollout.runs import POD_END_SECONDS
from specdecode_operator.types import Deployment, Manifest
from specdecode_worker.__main__ import main
from specdecode_worker.commands import capture, distill
from specdecode_worker.commands import distillation_job as distill_job
from specdecode_worker.contract import Env
from support.operators.fleet import DEFAULTS, RUN, deployment_with

PROMPTS = {"promptsConfigMapRef": {"name": "mine"}}


def deployment(settings: dict[str, Any] | None = None, **spec: Any) -> Deployment:
    distillation = {**(settings or {}), "storage": {"uri": "pvc://drafts"}}
    return deployment_with(**{"distillation": distillation, **spec})


def job(settings: dict[str, Any] | None = None, **spec: Any) -> Manifest:
    return distillation_job(deployment(settings, **spec), RUN, DEFAULTS)


def pod(settings: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return job(settings, **spec)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def container(settings: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    (only,) = pod(settings, **spec)["containers"]
    return only  # type: ignore[no-any-return]


def flags(settings: dict[str, Any] | None = None, **spec: Any) -> dict[str, str]:
    command = container(settings, **spec)["command"]
    assert command[:4] == ["specdecode-worker", "distill", "--job", "--prune"]
    return dict(word.removeprefix("--").split("=", 1) for word in command[4:])


def volume(name: str, settings: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    (only,) = (one for one in pod(settings, **spec)["volumes"] if one["name"] == name)
    return only  # type: ignore[no-any-return]


def test_no_service_selects_the_pods_and_the_deployment_owns_the_job() -> None:
    made = job()
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == ("batch/v1", "Job", "demo-distill-6740f2a1")
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["controller"]) == ("SpecDecodeDeployment", True)
    for labels in (made["metadata"]["labels"], made["spec"]["template"]["metadata"]["labels"]):
        assert labels[objects.ROLE_LABEL] == "job"
        for selected in (objects.service_labels("demo"), objects.selector("demo"), objects.router_labels("demo")):
            assert not selected.items() <= labels.items()


def test_drafts_are_trained_for_the_target_as_it_is_served() -> None:
    model = {"uri": "hf://org/target", "adapter": "hf://org/adapter"}
    (pull,) = pod(model=model)["initContainers"]
    assert flags(model=model)["model"] == pull["command"][-2] == "hf://org/target+hf://org/adapter"
    assert flags(engine={"quantization": "fp8"})["quantization"] == "fp8"
    assert "quantization" not in flags()


def test_name_of_a_long_deployment_stays_a_label() -> None:
    long = job_name("a" * 60, "run-1")
    assert len(long) <= 63
    assert long != job_name("a" * 60, "run-2")
    assert job_name("demo", "1") == "demo-distill-1"


def test_queue_label_is_there_with_a_queue_alone_and_suspend_is_left_to_kueue() -> None:
    queued = job({"jobTemplate": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}}}})
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "suspend" not in queued["spec"]
    assert "kueue.x-k8s.io/queue-name" not in job()["metadata"]["labels"]


def test_preemption_costs_no_retry_and_the_deadline_leaves_time_for_a_verdict() -> None:
    spec = job({"timeLimit": "1h"})["spec"]
    ignored, usage = spec["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert usage["onExitCodes"]["values"] == [64]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (3, 3600 + DEADLINE_MARGIN_SECONDS)
    assert flags({"timeLimit": "1h"})["time-limit"] == "3600"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "needed by podFailurePolicy"


def test_only_distill_writes_the_claim_and_each_run_has_its_folder() -> None:
    spec = {"speculation": {"draft": {"uri": "pvc://drafts/demo/0"}}}
    claims = [one for one in pod(**spec)["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [{"name": "claim-drafts", "persistentVolumeClaim": {"claimName": "drafts"}}]
    mounts = {
        one["name"]: [mount for mount in one["volumeMounts"] if mount["name"] == "claim-drafts"]
        for one in (*pod(**spec)["initContainers"], *pod(**spec)["containers"])
    }
    assert mounts["distill"] == [{"name": "claim-drafts", "mountPath": "/mnt/pvc/drafts"}]
    assert mounts["pull"] == [{"name": "claim-drafts", "mountPath": "/mnt/pvc/drafts", "readOnly": True}]
    assert flags()["out"] == "/mnt/pvc/drafts/distillation/demo/6740f2a1", "a new pod goes on there"
    assert flags()["publish"] == "pvc://drafts/drafts/demo"


def test_prompts_come_from_the_config_map_that_the_spec_names() -> None:
    assert "golden" not in flags()
    assert "prompts" not in [one["name"] for one in pod()["volumes"]]
    (source,) = volume("prompts", PROMPTS)["projected"]["sources"]
    assert source["configMap"]["name"] == "mine"
    assert [item["key"] for item in source["configMap"]["items"]] == ["golden.jsonl", "replay.jsonl"]
    assert flags(PROMPTS)["golden"] == "/etc/specdecode/prompts/golden.jsonl"
    assert flags(PROMPTS)["replay-prompts"] == "/etc/specdecode/prompts/replay.jsonl"


def test_the_template_is_merged_and_changes_no_label_that_services_select() -> None:
    template = {
        "metadata": {"labels": {"team": "x", objects.ROLE_LABEL: "worker", objects.VARIANT_LABEL: "stable"}},
        "spec": {
            "runtimeClassName": "nvidia",
            "containers": [{"name": "distill", "env": [{"name": "A", "value": "b"}]}],
        },
    }
    made = job({"jobTemplate": template})["spec"]["template"]
    assert made["metadata"]["labels"]["team"] == "x"
    assert not objects.service_labels("demo").items() <= made["metadata"]["labels"].items()
    assert made["spec"]["runtimeClassName"] == "nvidia"
    assert {"name": "A", "value": "b"} in made["spec"]["containers"][0]["env"]
    wrong = deployment({"jobTemplate": {"spec": {"containers": [{"image": "x"}]}}})
    with pytest.raises(SpecError, match=r"distillation\.jobTemplate\.spec\.containers\[0\] needs a name"):
        check_job_template(wrong, DEFAULTS)


def template_with(resources: dict[str, Any], **pod: Any) -> dict[str, Any]:
    container = {"name": "distill", "image": "trainer:1", "resources": resources}
    return {"jobTemplate": {"spec": {**pod, "containers": [container]}}}


def test_devices_are_those_of_the_template_and_pull_needs_none() -> None:
    resources = {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi", "nvidia.com/mig-1g.10gb": 1}}
    wanted = template_with(resources, nodeSelector={"pool": "gpu"})
    made = pod(wanted)
    assert made["nodeSelector"] == {"pool": "gpu"}
    assert made["containers"][0]["image"] == "trainer:1"
    assert container()["image"] == "localhost/worker:1"
    assert made["containers"][0]["resources"] == resources
    assert made["initContainers"][0]["resources"] == {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}}
    assert (flags(wanted)["device"], flags()["device"]) == ("cuda", "cpu")
    four = template_with({"limits": {"nvidia.com/gpu": 4}})
    sizes = [flags(each)["tensor-parallel-size"] for each in (wanted, four, {})]
    assert sizes == ["1", "4", "1"], "the target is split over all devices"
    assert "nodeSelector" not in pod()


def test_threads_on_a_cpu_are_the_whole_cores_of_the_limit() -> None:
    made = container(template_with({"limits": {"cpu": "2500m"}}))
    assert {one["name"]: one.get("value") for one in made["env"]}["OMP_NUM_THREADS"] == "2"
    with_device = container(template_with({"limits": {"cpu": "2500m", "nvidia.com/gpu": 1}}))["env"]
    assert "OMP_NUM_THREADS" not in {one["name"] for one in with_device}


def test_captures_are_pulled_from_all_workers_with_the_capture_token_alone() -> None:
    assert flags()["capture-from"] == "demo-workers.ns.svc:8001"
    env = {one["name"]: one for one in container()["env"]}
    assert env[Env.capture_token]["valueFrom"]["secretKeyRef"] == {"name": "demo-tokens", "key": "capture"}
    text = str(pod())
    assert text.count("demo-tokens") == 1, "no volume has the other tokens"


def test_with_tls_the_job_has_the_certificate_of_the_ca_and_no_key() -> None:
    spec = {"tlsSecretRef": {"name": "demo-tls"}}
    assert flags(**spec)["capture-from"] == "https://demo-workers.ns.svc:8001"
    assert flags(**spec)["capture-ca"] == "/etc/specdecode/tls/ca.crt"
    secret = volume("tls-ca", **spec)["secret"]
    assert (secret["secretName"], secret["items"]) == ("demo-tls", [{"key": "ca.crt", "path": "ca.crt"}])


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_folders_that_torch_writes_are_mounted(variable: str) -> None:
    (container,) = pod()["containers"]
    folder = next(one["value"] for one in container["env"] if one["name"] == variable)
    writable = [one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")]
    assert any(Path(folder).is_relative_to(mounted) for mounted in writable), "the root file system is read-only"


def test_drafts_to_keep_are_on_the_command_line() -> None:
    assert "keep-drafts" not in flags(), "without hashes no draft is deleted"
    made = distillation_job(deployment(), RUN, DEFAULTS, ("0a", "1b"))
    assert "--keep-drafts=0a,1b" in made["spec"]["template"]["spec"]["containers"][0]["command"]


def test_every_mount_has_its_volume() -> None:
    made = pod(PROMPTS, tlsSecretRef={"name": "t"})
    names = {one["name"] for one in made["volumes"]}
    for one in (*made["initContainers"], *made["containers"]):
        assert {mount["name"] for mount in one["volumeMounts"]} <= names
    assert made["initContainers"][0]["command"][-1] == "hf://org/head"


@pytest.mark.parametrize("settings", [{}, {**PROMPTS, "steps": 50}], ids=["least", "most"])
def test_command_line_is_one_that_distill_takes(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(distill, "run", lambda args: seen.append(args) or 0)
    words = container(settings)["command"][1:]
    assert main(words) == 0
    (args,) = seen
    distill_job.check_job_flags(args)
    assert args.job
    assert args.prune
    assert args.steps == settings.get("steps", 2000)
    assert (args.replay_prompts is None) == (args.replay_share == 0)
    assert (args.golden is None) == ("promptsConfigMapRef" not in settings)
    assert args.max_age == 14 * 86400


# --- deletion of a run ----------------------------------------------------------------------------------------------


def deletion(**settings: Any) -> Manifest:
    distillation = {**settings, "storage": {"uri": "pvc://another"}}
    return deletion_job(deployment_with(distillation=distillation), RUN, DEFAULTS)


def test_the_deletion_deletes_the_folder_that_the_training_wrote(monkeypatch: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(capture, "run", lambda args: seen.append(args) or 0)
    (container,) = deletion()["spec"]["template"]["spec"]["containers"]
    assert main(container["command"][1:]) == 0
    (args,) = seen
    trained = distillation_job(deployment_with(), RUN, DEFAULTS)["spec"]["template"]["spec"]["containers"][0]
    assert args.action == "prune"
    assert f"--out={args.folders[0]}" in trained["command"]
    (volume,) = deletion()["spec"]["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "drafts"}, "of the run, not of the spec"
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/mnt/pvc/drafts"}]


def test_the_deletion_runs_where_the_training_ran_without_device_and_queue() -> None:
    template = {
        "metadata": {"labels": {objects.ROLE_LABEL: "worker", "kueue.x-k8s.io/queue-name": "team"}},
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "runtimeClassName": "x",
            "initContainers": [{"name": "pull", "env": []}],
            "containers": [{"name": "distill", "resources": {"limits": {"nvidia.com/gpu": 1}}}, {"name": "side"}],
            "volumes": [{"name": "more", "emptyDir": {}}],
        },
    }
    made = deletion(jobTemplate=template)
    pod = made["spec"]["template"]["spec"]
    assert (pod["runtimeClassName"], pod["nodeSelector"]) == ("x", {"pool": "gpu"})
    (container,) = pod["containers"]
    assert container["image"] == "localhost/worker:1"
    assert "nvidia.com/gpu" not in str(pod)
    assert "initContainers" not in pod
    assert len(pod["volumes"]) == 1
    assert "kueue.x-k8s.io/queue-name" not in str(made), "a queue that is full must not keep captured text"
    plain = distillation_job(deployment_with(), RUN, DEFAULTS)["spec"]["template"]["spec"]
    assert pod["securityContext"] == plain["securityContext"], "it has the user that owns the files"
    for labels in (made["metadata"]["labels"], made["spec"]["template"]["metadata"]["labels"]):
        assert (labels[objects.ROLE_LABEL], labels[RUN_LABEL]) == ("job", "6740f2a1-delete")


def test_the_name_of_the_deletion_is_a_label_and_it_waits_for_the_end_of_the_pods() -> None:
    assert deletion_job_name("demo", "6740f2a1") == "demo-delete-6740f2a1"
    assert len(deletion_job_name("a" * 60, "6740f2a1")) <= 63
    assert POD_END_SECONDS >= GRACE_SECONDS + 60


# --- drafts in a bucket: all pods get the key, and a run writes to a folder of its pod -------------------------------

S3 = {"uri": "s3://models/team", "endpoint": "https://s3.example.com", "secretRef": {"name": "key"}}


def pods_with_bucket() -> dict[str, dict[str, Any]]:
    """Return the pods of the Job and of a worker."""
    with_bucket = deployment_with(distillation={"storage": S3})
    run = RUN.model_copy(update={"bucket": S3["uri"], "claim": ""})
    made = distillation_job(with_bucket, run, DEFAULTS)
    return {"job": made["spec"]["template"]["spec"], "worker": pod_template(with_bucket, DEFAULTS)["spec"]}


@pytest.mark.parametrize("role", ["job", "worker"])
def test_all_containers_that_read_or_write_drafts_have_the_key(role: str) -> None:
    made = pods_with_bucket()[role]
    for container in (*made["initContainers"], *made["containers"]):
        env = {one["name"]: one for one in container["env"]}
        assert (env["AWS_ENDPOINT_URL_S3"]["value"], env["AWS_REGION"]["value"]) == (S3["endpoint"], "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert env[name]["valueFrom"] == {"secretKeyRef": {"name": "key", "key": name}}
        assert env["AWS_SESSION_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True
        assert len(env) == len(container["env"]), "no name stands twice"
    assert "AWS_" not in str([pod(), pod_template(deployment(), DEFAULTS)])


def test_a_run_writes_to_a_bounded_folder_and_publishes_to_the_bucket() -> None:
    made = pods_with_bucket()["job"]
    (container,) = made["containers"]
    (scratch,) = (one for one in made["volumes"] if one["name"] == "scratch")
    assert scratch["emptyDir"] == {"sizeLimit": "64Gi"}
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "scratch")
    (out,) = (word for word in container["command"] if word.startswith("--out="))
    assert out == f"--out={mount['mountPath']}/distillation/demo/6740f2a1"
    assert "--publish=s3://models/team/drafts/demo" in container["command"]
    assert not any("persistentVolumeClaim" in one for one in made["volumes"])


def test_aws_needs_no_endpoint_and_users_variables_win_in_the_worker() -> None:
    s3 = {"uri": "s3://models", "secretRef": {"name": "key"}, "region": "eu-west-1"}
    mine = {"name": "worker", "env": [{"name": "AWS_REGION", "value": "mine"}]}
    template = {"spec": {"containers": [mine]}}
    of_aws = deployment_with(distillation={"storage": s3}, workers={"template": template})
    assert "AWS_ENDPOINT_URL_S3" not in str(bucket_environment(of_aws.spec))
    (worker,) = pod_template(of_aws, DEFAULTS)["spec"]["containers"]
    assert [one["value"] for one in worker["env"] if one["name"] == "AWS_REGION"] == ["mine"]


def test_another_path_in_the_store_replaces_no_worker() -> None:
    first, path, key = (
        rolling_hash(deployment_with(distillation={"storage": {**S3, **change}}).spec)
        for change in ({}, {"uri": "s3://b12/other"}, {"secretRef": {"name": "other"}})
    )
    assert first == path != key
