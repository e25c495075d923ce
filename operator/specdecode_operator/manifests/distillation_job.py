"""Job that distils a draft: a Job of batch/v1 around ``specdecode-worker distill --job``.

It is created once and never applied again, because Kueue changes it: it sets ``suspend`` and adds node selectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.manifests.config import CACHE_DIR, TLS_DIR, unpinned_uris
from specdecode_operator.manifests.identity import (
    NAME_LABEL,
    ROLE_LABEL,
    VARIANT_LABEL,
    Role,
    TokenScope,
    headless_name,
    metadata,
    tokens_name,
)
from specdecode_operator.manifests.template import pod_security_context
from specdecode_operator.manifests.volumes import REVISIONS_PATH, pull_mounts, secret_volume, volumes
from specdecode_operator.types import Defaults, Deployment, Manifest
from specdecode_worker.contract import Env, Port
from specdecode_worker.contract.distillation import JOB_CONTAINER

RUN_LABEL = f"{GROUP}/run"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
SCRATCH_DIR = "/var/lib/specdecode/distillation"
PROMPTS_DIR = "/etc/specdecode/prompts"
DEADLINE_MARGIN_SECONDS = 600
"""Time beyond the limit in which the command ends by itself and writes its verdict, with loading of the model."""
GRACE_SECONDS = 120
"""Time after SIGTERM to finish a step and to write a checkpoint."""
USAGE_EXIT_CODE = 64
"""Exit code of `distill` for wrong flags, which no retry changes."""
_MAX_NAME = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationJob:
    """Settings of one run.

    ``run`` names the run within its deployment: it is part of the Job's name and of the folder on a scratch claim.
    """

    run: str
    draft_uri: str
    """Draft to go on from."""
    golden_config_map: str
    """ConfigMap with the file ``golden.jsonl`` and, if answers to prompts are replayed, ``replay.jsonl``."""
    has_replay_prompts: bool = False
    time_limit_seconds: int = 4 * 3600
    steps: int | None = None
    image: str | None = None
    """None for the image of the workers."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    accelerator_resource: str = "nvidia.com/gpu"
    accelerators: int = 0
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    priority_class_name: str | None = None
    queue_name: str | None = None
    """LocalQueue of Kueue; None for a Job that starts at once."""
    scratch_claim: str | None = None
    """Claim for checkpoints and data. None for an emptyDir, with which a new pod starts from the beginning."""
    scratch_size: str = "50Gi"
    """Size limit of the emptyDir."""
    head_uri: str | None = None
    """URI under which workers read the candidate; None for the path in the Job's own file system."""
    backoff_limit: int = 3
    """Pods that may fail, other than by preemption, before the Job fails."""


def job_name(deployment: str, run: str) -> str:
    """Return the name of the Job: a DNS label, which is also a label of its pods."""
    name = f"{deployment}-distill-{run}"
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[: _MAX_NAME - 11].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def distillation_job(deployment: Deployment, settings: DistillationJob, defaults: Defaults) -> Manifest:
    """Return the Job. ``suspend`` is absent: with a queue name, Kueue suspends the Job when it is created."""
    made = metadata(deployment, job_name(deployment.name, settings.run))
    labels = _labels(made["labels"], deployment, settings)
    queue = {QUEUE_LABEL: settings.queue_name} if settings.queue_name else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**made, "labels": {**labels, **queue}},
        "spec": {
            "backoffLimit": settings.backoff_limit,
            "activeDeadlineSeconds": settings.time_limit_seconds + DEADLINE_MARGIN_SECONDS,
            "completions": 1,
            "parallelism": 1,
            "podFailurePolicy": _failure_policy(),
            # A replacement starts only when the earlier pod has ended, because both would write to the scratch claim.
            "podReplacementPolicy": "Failed",
            "template": {"metadata": {"labels": labels}, "spec": _pod(deployment, settings, defaults)},
        },
    }


def _labels(labels: Mapping[str, str], deployment: Deployment, settings: DistillationJob) -> dict[str, str]:
    """Return the labels of the Job and its pods. No Service selects the role ``job``."""
    others = {key: value for key, value in labels.items() if key not in (ROLE_LABEL, VARIANT_LABEL)}
    own = {NAME_LABEL: deployment.name, ROLE_LABEL: Role.job.value, RUN_LABEL: settings.run}
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


def _pod(deployment: Deployment, settings: DistillationJob, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    scheduling = {
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(toleration) for toleration in settings.tolerations],
        "priorityClassName": settings.priority_class_name,
        "imagePullSecrets": [{"name": name} for name in spec.workers.image_pull_secrets],
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": pod_security_context(),
        "initContainers": [_pull(deployment, settings, defaults)],
        "containers": [_distill(deployment, settings, defaults)],
        "volumes": _volumes(deployment, settings),
        **{name: value for name, value in scheduling.items() if value},
    }


def _container(deployment: Deployment, settings: DistillationJob, defaults: Defaults, name: str) -> dict[str, Any]:
    workers = deployment.spec.workers
    return {
        "name": name,
        "image": settings.image or workers.image or defaults.worker_image,
        "imagePullPolicy": workers.image_pull_policy or defaults.worker_image_pull_policy,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _pull(deployment: Deployment, settings: DistillationJob, defaults: Defaults) -> dict[str, Any]:
    """Return the init container that fetches target and draft, as in a worker."""
    spec = deployment.spec
    secret = spec.model.token_secret_ref
    env: list[dict[str, Any]] = [{"name": "HOME", "value": "/tmp"}]
    if unpinned_uris(spec):
        env.append({"name": Env.revisions_path, "value": REVISIONS_PATH})
    if secret:
        env.append(_from_secret("HF_TOKEN", secret.name, secret.key))
    uris = dict.fromkeys([spec.model.uri, settings.draft_uri])
    return {
        **_container(deployment, settings, defaults, "pull"),
        "command": ["specdecode-worker", "pull", "--cache-dir", CACHE_DIR, *uris],
        "env": env,
        "resources": dict(settings.resources),
        "volumeMounts": pull_mounts(spec),
    }


def _distill(deployment: Deployment, settings: DistillationJob, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    tls = [{"name": "tls-ca", "mountPath": TLS_DIR, "readOnly": True}] if spec.tls else []
    env = [
        {"name": "HOME", "value": "/tmp"},
        {"name": "XDG_CACHE_HOME", "value": "/tmp"},
        *([{"name": Env.revisions_path, "value": REVISIONS_PATH}] if unpinned_uris(spec) else []),
        _from_secret(Env.capture_token, tokens_name(deployment.name), TokenScope.capture.value),
    ]
    return {
        **_container(deployment, settings, defaults, JOB_CONTAINER),
        "command": ["specdecode-worker", "distill", *arguments(deployment, settings)],
        "env": env,
        "resources": _resources(settings),
        "volumeMounts": [
            *pull_mounts(spec),
            {"name": "scratch", "mountPath": SCRATCH_DIR},
            {"name": "prompts", "mountPath": PROMPTS_DIR, "readOnly": True},
            *tls,
        ],
    }


def arguments(deployment: Deployment, settings: DistillationJob) -> list[str]:
    """Return the flags of ``specdecode-worker distill``."""
    spec = deployment.spec
    host = f"{headless_name(deployment.name)}.{deployment.namespace}.svc"
    values: dict[str, object] = {
        "model": spec.model.uri,
        "draft": settings.draft_uri,
        "capture-from": f"{'https://' if spec.tls else ''}{host}:{Port.admin}",
        "golden": f"{PROMPTS_DIR}/golden.jsonl",
        "out": f"{SCRATCH_DIR}/{settings.run}",
        "cache-dir": CACHE_DIR,
        "dtype": spec.model.dtype,
        "time-limit": settings.time_limit_seconds,
        "device": "cuda" if settings.accelerators else "cpu",
    }
    if spec.tls:
        values["capture-ca"] = f"{TLS_DIR}/ca.crt"
    if settings.has_replay_prompts:
        values["replay-prompts"] = f"{PROMPTS_DIR}/replay.jsonl"
    else:
        values["replay-share"] = 0
    if settings.steps is not None:
        values["steps"] = settings.steps
    if settings.head_uri is not None:
        values["head-uri"] = settings.head_uri
    return ["--job", *(f"--{flag}={value}" for flag, value in values.items())]


def _resources(settings: DistillationJob) -> dict[str, Any]:
    resources = dict(settings.resources)
    if settings.accelerators:
        resources["limits"] = {**resources.get("limits", {}), settings.accelerator_resource: settings.accelerators}
    return resources


def _volumes(deployment: Deployment, settings: DistillationJob) -> list[dict[str, Any]]:
    spec = deployment.spec
    models = {mount["name"] for mount in pull_mounts(spec)}
    claim = settings.scratch_claim
    made = [
        *(volume for volume in volumes(spec, deployment.name) if volume["name"] in models),
        {
            "name": "scratch",
            **(
                {"persistentVolumeClaim": {"claimName": claim}}
                if claim
                else {"emptyDir": {"sizeLimit": settings.scratch_size}}
            ),
        },
        {"name": "prompts", "configMap": {"name": settings.golden_config_map}},
    ]
    if spec.tls:
        # Only the certificate of the CA: the key of the workers stays with the workers.
        made.append(secret_volume("tls-ca", spec.tls.secret_name, "ca.crt"))
    return made


def _from_secret(variable: str, name: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
