"""The Job that deletes the folder of a training run without a verdict."""

from __future__ import annotations

from typing import Any

from specdecode_operator.manifests import objects
from specdecode_operator.manifests.jobs import (
    GRACE_SECONDS,
    RUN_LABEL,
    deletion_job,
    deletion_job_name,
    distillation_job,
)
from specdecode_operator.rollout.runs import POD_END_SECONDS
from specdecode_operator.state.learned import RunRecord
from specdecode_operator.types import Manifest
from specdecode_worker.__main__ import main
from specdecode_worker.commands import capture
from support.operators.fleet import DEFAULTS, deployment_with

RUN = RunRecord(id="6740f2a1", started=1.0, draft_uri="hf://org/head", claim="drafts")


def job(**settings: Any) -> Manifest:
    distillation = {**settings, "storage": {"uri": "pvc://another"}}
    return deletion_job(deployment_with(distillation=distillation), RUN, DEFAULTS)


def test_it_deletes_the_folder_that_the_training_wrote(monkeypatch: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(capture, "run", lambda args: seen.append(args) or 0)
    (container,) = job()["spec"]["template"]["spec"]["containers"]
    assert main(container["command"][1:]) == 0
    (args,) = seen
    trained = distillation_job(deployment_with(), RUN, DEFAULTS)["spec"]["template"]["spec"]["containers"][0]
    assert args.action == "prune"
    assert f"--out={args.folders[0]}" in trained["command"]
    (volume,) = job()["spec"]["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "drafts"}, "of the run, not of the spec"
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/mnt/pvc/drafts"}]


def test_it_runs_where_the_training_ran_without_device_and_queue() -> None:
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
    made = job(jobTemplate=template)
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


def test_its_name_is_a_label_and_it_waits_for_the_end_of_the_pods() -> None:
    assert deletion_job_name("demo", "6740f2a1") == "demo-delete-6740f2a1"
    assert len(deletion_job_name("a" * 60, "6740f2a1")) <= 63
    assert POD_END_SECONDS >= GRACE_SECONDS + 60
