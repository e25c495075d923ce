"""Jobs of batch/v1: one that trains a draft, and one that deletes the folder of a run that ended without a verdict."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdecode_operator.api.v1alpha1 import (
    GROUP,
    NAME_LABEL,
    DistillationCaptureSpec,
    object_in,
    without_devices,
)
from specdecode_operator.drafts.job_status import deletion_id, published_prefix, run_folder
from specdecode_operator.manifests.objects import (
    ROLE_LABEL,
    VARIANT_LABEL,
    Role,
    TokenScope,
    headless_name,
    metadata,
    tokens_name,
)
from specdecode_operator.manifests.pods import (
    CACHE_DIR,
    CLAIMS_DIR,
    FLEET_TEMPLATE,
    REVISIONS_PATH,
    TLS_DIR,
    bucket_environment,
    claim_volume,
    labelled,
    merged,
    pod_fields,
    pull_environment,
    pull_mounts,
    run_mount,
    run_out,
    run_volume,
    secret_variable,
    secret_volume,
    torch_environment,
    torch_mounts,
    unpinned_uris,
    user_settings,
    volumes,
    whole_cores,
    worker_container,
)
from specdecode_operator.state.learned import RunRecord
from specdecode_operator.times import seconds_of
from specdecode_operator.types import Defaults, Deployment, Manifest
from specdecode_worker.contract import Env, Port
from specdecode_worker.contract.distillation import JOB_CONTAINER

# Job that distils a draft: a Job of batch/v1 around ``specdecode-worker distill --job``.
#
# It is created once and never applied again, because Kueue changes it: it sets ``suspend`` and adds node selectors.
# Checkpoints and data lie in the run's folder on the claim of new drafts, so that a new pod goes on where the last one
# was. With a bucket they lie in a folder of the pod, and a new pod begins anew.

RUN_LABEL = f"{GROUP}/run"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PROMPTS_DIR = "/etc/specdecode/prompts"
GOLDEN, REPLAY = "golden.jsonl", "replay.jsonl"
"""Entries of the ConfigMap with prompts."""
BACKOFF_LIMIT = 3
"""Pods that may fail, other than by preemption, before the Job fails."""
DEADLINE_MARGIN_SECONDS = 3600
"""Time beyond the limit, which counts from the command's start: for pulls of images and models, also of pods that take
over, and for the command to end by itself and to write its verdict."""
GRACE_SECONDS = 120
"""Time after SIGTERM to finish a step and to write a checkpoint."""
USAGE_EXIT_CODE = 64
"""Exit code of `distill` for wrong flags, which no retry changes."""
_MAX_NAME = 63
_EXAMPLE = RunRecord(id="0", started=0, draft_uri="embedded://draft", claim="claim")


def job_name(deployment: str, run: str) -> str:
    """Return the name of the Job: a DNS label, which is also a label of its pods."""
    return job_label(f"{deployment}-distill-{run}")


def job_label(name: str) -> str:
    """Return the name of a Job, shortened to the length of a label."""
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[: _MAX_NAME - 11].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def check_job_template(deployment: Deployment, defaults: Defaults) -> None:
    """Raise SpecError if distillation.jobTemplate cannot be merged, long before a run needs it."""
    distillation_job(deployment, _EXAMPLE, defaults)


def distillation_job(deployment: Deployment, run: RunRecord, defaults: Defaults, keep: Sequence[str] = ()) -> Manifest:
    """Return the Job. ``suspend`` is absent: with a queue name, Kueue suspends the Job when it is created.

    Args:
        deployment: The resource.
        run: Training run of the Job.
        defaults: Values where the spec has none.
        keep: Hashes of the published drafts that it must not delete.

    Raises:
        SpecError: The user's template cannot be merged.
    """
    distillation = deployment.spec.distillation
    made = metadata(deployment, job_name(deployment.name, run.id))
    labels = job_labels(made["labels"], deployment, run.id)
    users = object_in(object_in(distillation.job_template, "metadata"), "labels")
    queue = {QUEUE_LABEL: users[QUEUE_LABEL]} if users.get(QUEUE_LABEL) else {}
    return _job(
        {**made, "labels": {**labels, **queue}},
        activeDeadlineSeconds=distillation.time_limit_seconds + DEADLINE_MARGIN_SECONDS,
        podFailurePolicy=_failure_policy(),
        # A replacement starts only when the earlier pod has ended, because both would write to the run's folder.
        podReplacementPolicy="Failed",
        template=job_template(_pod(deployment, run, defaults, keep), labels, distillation.job_template, defaults),
    )


def _job(made: Mapping[str, Any], **spec: Any) -> Manifest:
    """Return a Job of one pod at a time, with this metadata and these further fields."""
    fixed = {"backoffLimit": BACKOFF_LIMIT, "completions": 1, "parallelism": 1}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": made, "spec": {**fixed, **spec}}


def job_template(
    pod: Mapping[str, Any], labels: Mapping[str, str], users: Mapping[str, Any], defaults: Defaults
) -> dict[str, Any]:
    """Return the template of a Job's pods: ``pod`` with the workers' template of the settings and the user's over it.

    Of the former, containers and volumes are left out: they are those of workers.

    Raises:
        SpecError: The user's template cannot be merged.
    """
    fleet = {**defaults.worker_template, "spec": without_containers(object_in(defaults.worker_template, "spec"))}
    template = merged({"metadata": {"labels": labels}, "spec": pod}, fleet, FLEET_TEMPLATE)
    template = merged(template, users, "distillation.jobTemplate")
    # The labels stay, whatever the user's template says: another role would put the pod into a Service.
    return labelled(template, labels)


def without_containers(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pod apart from containers and volumes."""
    return {name: value for name, value in pod.items() if name not in ("containers", "initContainers", "volumes")}


def job_labels(labels: Mapping[str, str], deployment: Deployment, run: str) -> dict[str, str]:
    """Return the labels of a Job and its pods. No Service selects the role ``job``."""
    others = {key: value for key, value in labels.items() if key not in (ROLE_LABEL, VARIANT_LABEL)}
    own = {NAME_LABEL: deployment.name, ROLE_LABEL: Role.job.value, RUN_LABEL: run}
    return {**others, **own, "app.kubernetes.io/name": "specdecode-distillation"}


def _failure_policy() -> dict[str, Any]:
    """Return the policy: preemption costs no retry, wrong usage ends the Job, everything else is retried."""
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": JOB_CONTAINER, "operator": "In", "values": [USAGE_EXIT_CODE]},
            },
        ]
    }


def _pod(deployment: Deployment, run: RunRecord, defaults: Defaults, keep: Sequence[str]) -> dict[str, Any]:
    settings = user_settings(deployment.spec, deployment.name, defaults)
    return {
        **pod_fields(deployment.spec, defaults),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "initContainers": [settings.given_to(_pull(deployment, run, defaults))],
        "containers": [settings.given_to(_distill(deployment, run, defaults, keep))],
        "volumes": [*_volumes(deployment, run, defaults), *settings.volumes],
    }


def _pull(deployment: Deployment, run: RunRecord, defaults: Defaults) -> dict[str, Any]:
    """Return the init container that fetches target and draft, as in a worker."""
    spec = deployment.spec
    uris = dict.fromkeys([spec.model.target, run.draft_uri])
    return {
        **worker_container(deployment.spec, defaults, "pull"),
        "command": ["specdecode-worker", "pull", "--cache-dir", CACHE_DIR, *uris],
        "env": pull_environment(spec, defaults),
        "resources": without_devices(spec.distillation.job_resources),
        "volumeMounts": pull_mounts(spec),
    }


def _distill(deployment: Deployment, run: RunRecord, defaults: Defaults, keep: Sequence[str]) -> dict[str, Any]:
    spec = deployment.spec
    tls = [{"name": "tls-ca", "mountPath": TLS_DIR, "readOnly": True}] if spec.tls_secret_ref else []
    prompts = [{"name": "prompts", "mountPath": PROMPTS_DIR, "readOnly": True}] if _prompts(deployment) else []
    written = run_mount(run)
    models = [mount for mount in pull_mounts(spec) if mount["mountPath"] != written["mountPath"]]
    threads = (
        None
        if spec.distillation.job_devices
        else whole_cores(object_in(spec.distillation.job_resources, "limits"), "distillation.jobTemplate: limits")
    )
    env = [
        {"name": "HOME", "value": "/tmp"},
        *torch_environment(),
        *([{"name": "OMP_NUM_THREADS", "value": str(threads)}] if threads else []),
        *([{"name": Env.revisions_path, "value": REVISIONS_PATH}] if unpinned_uris(spec) else []),
        secret_variable(Env.capture_token, tokens_name(deployment.name), TokenScope.capture.value),
        *bucket_environment(spec),
    ]
    return {
        **worker_container(deployment.spec, defaults, JOB_CONTAINER),
        "command": ["specdecode-worker", "distill", *arguments(deployment, run, keep)],
        "env": env,
        "resources": {},
        "volumeMounts": [*models, written, *torch_mounts(), *prompts, *tls],
    }


def arguments(deployment: Deployment, run: RunRecord, keep: Sequence[str] = ()) -> list[str]:
    """Return the flags of ``specdecode-worker distill``. Without ``keep`` no draft is deleted."""
    spec, distillation = deployment.spec, deployment.spec.distillation
    capture = distillation.capture or DistillationCaptureSpec()
    host = f"{headless_name(deployment.name)}.{deployment.namespace}.svc"
    values: dict[str, object] = {
        "model": spec.model.target,
        "draft": run.draft_uri,
        "capture-from": f"{'https://' if spec.tls_secret_ref else ''}{host}:{Port.admin}",
        "out": run_out(deployment.name, run),
        "publish": published_prefix(run.place, deployment.name),
        "cache-dir": CACHE_DIR,
        "dtype": spec.engine.dtype,
        "time-limit": distillation.time_limit_seconds,
        "max-age": int(seconds_of(capture.max_age)),
        "device": "cuda" if distillation.job_devices else "cpu",
        "tensor-parallel-size": max(1, distillation.job_devices),
    }
    if spec.engine.quantization:
        values["quantization"] = spec.engine.quantization
    if keep:
        values["keep-drafts"] = ",".join(keep)
    if spec.tls_secret_ref:
        values["capture-ca"] = f"{TLS_DIR}/ca.crt"
    if distillation.prompts_config_map_ref:
        values["golden"] = f"{PROMPTS_DIR}/{GOLDEN}"
        values["replay-prompts"] = f"{PROMPTS_DIR}/{REPLAY}"
    else:
        values["replay-share"] = 0
    if distillation.steps is not None:
        values["steps"] = distillation.steps
    return ["--job", "--prune", *(f"--{flag}={value}" for flag, value in values.items())]


def _volumes(deployment: Deployment, run: RunRecord, defaults: Defaults) -> list[dict[str, Any]]:
    spec, written = deployment.spec, run_volume(run)
    shared = {mount["name"] for mount in (*pull_mounts(spec), *torch_mounts())} - {written["name"]}
    made = [
        *(volume for volume in volumes(spec, deployment.name, defaults) if volume["name"] in shared),
        written,
    ]
    if sources := _prompts(deployment):
        made.append({"name": "prompts", "projected": {"sources": sources}})
    if spec.tls_secret_ref:
        # Only the certificate of the CA: the key of the workers stays with the workers.
        made.append(secret_volume("tls-ca", spec.tls_secret_ref.name, "ca.crt"))
    return made


def _prompts(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the sources of the prompts' volume: the files of the ConfigMap that the spec names."""
    reference = deployment.spec.distillation.prompts_config_map_ref
    items = [{"key": key, "path": key} for key in (GOLDEN, REPLAY)]
    return [{"configMap": {"name": reference.name, "items": items}}] if reference else []


# Job that deletes the folder of a training run that ended without a verdict, with the captured text in it.
#
# It runs where the training ran and with the same user, so that it can mount the claim and write to it, and needs no
# device. Containers and volumes of the user's template are left out: they are those of the training.

DEADLINE_SECONDS = 1800
"""Time for all pods of the Job, with pulling the image."""
_RESOURCES = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}


def deletion_job_name(deployment: str, run: str) -> str:
    """Return the name of the Job."""
    return job_label(f"{deployment}-delete-{run}")


def deletion_job(deployment: Deployment, run: RunRecord, defaults: Defaults) -> Manifest:
    """Return the Job. It has no queue: a queue that is full must not keep captured text."""
    made = metadata(deployment, deletion_job_name(deployment.name, run.id))
    labels = job_labels(made["labels"], deployment, deletion_id(run.id))
    folder = f"{CLAIMS_DIR}/{run.claim}"
    container = {
        **worker_container(deployment.spec, defaults, JOB_CONTAINER),
        "command": ["specdecode-worker", "capture", "prune", f"{folder}/{run_folder(deployment.name, run.id)}"],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": _RESOURCES,
        "volumeMounts": [{"name": claim_volume(run.claim), "mountPath": folder}],
    }
    volume = {"name": claim_volume(run.claim), "persistentVolumeClaim": {"claimName": run.claim}}
    pod = {**pod_fields(deployment.spec, defaults), "restartPolicy": "Never"}
    pod |= {"containers": [container], "volumes": [volume]}
    template = deployment.spec.distillation.job_template
    given = object_in(object_in(template, "metadata"), "labels")
    users = {
        "metadata": {
            **object_in(template, "metadata"),
            "labels": {name: value for name, value in given.items() if name != QUEUE_LABEL},
        },
        "spec": without_containers(object_in(template, "spec")),
    }
    return _job(
        {**made, "labels": labels},
        activeDeadlineSeconds=DEADLINE_SECONDS,
        template=job_template(pod, labels, users, defaults),
    )
