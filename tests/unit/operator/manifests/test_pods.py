"""Pods and the other children as pure functions of the spec, and what may never change a live pod template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.decision.decide import decide
from specdecode_operator.errors import SpecError
from specdecode_operator.manifests.pods import merged, quantity_value, whole_cores
from specdecode_operator.state.learned import LearnedState, Session
from specdecode_operator.types import Decision, Defaults, Deployment, Observation
from specdecode_worker.contract import EngineConfig, Env, Plan, Port, ServerConfig, WorkerConfig
from specdecode_worker.contract.distillation import JOB_CONTAINER
from support.operators.fleet import DEFAULTS, RUN, deployment_with, loop_over, workload_with

Json = dict[str, Any]
UPGRADED = Defaults(worker_image="localhost/worker:2", worker_image_pull_policy="Always")
CLAIM = {"persistentVolumeClaim": {"claimName": "shared"}}
PREFETCH: Json = {"modelCache": {"hostPath": {"path": "/models"}}, "prefetchNodeSelector": {"models": "llama"}}
"""Fields of a deployment that fills the model caches of nodes."""


def template(**spec: Any) -> dict[str, Any]:
    return manifests.pod_template(deployment_with(**spec), DEFAULTS)


def container(rendered: dict[str, Any], name: str) -> dict[str, Any]:
    containers = rendered["spec"]["containers"] + rendered["spec"]["initContainers"]
    return next(item for item in containers if item["name"] == name)


def environment(rendered: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container(rendered, "worker")["env"]}


def pod_of(**spec: Any) -> Json:
    pod: Json = manifests.pod_template(deployment_with(**spec), DEFAULTS)["spec"]
    return pod


def worker_of(pod: Json) -> Json:
    worker: Json = next(container for container in pod["containers"] if container["name"] == "worker")
    return worker


def config_of(pod: Json) -> WorkerConfig:
    text = next(variable["value"] for variable in worker_of(pod)["env"] if variable["name"] == Env.config)
    return WorkerConfig.model_validate_json(text)


def test_the_worker_config_in_the_environment_is_complete() -> None:
    spec = {
        "model": {"uri": "hf://org/Llama@v1", "servedName": "llama"},
        "engine": {
            "dtype": "float32",
            "maxModelLen": 2048,
            "maxNumSeqs": 4,
            "kvCacheTokens": 4096,
            "memoryPercent": 90,
            "sampler": "mss",
            "extraArgs": ["--queue-timeout-seconds=5", "--api-key-metrics"],
        },
        "workers": {"resources": {"limits": {"cpu": "2500m"}}},
        "drain": {"endpointDelay": "7s", "gracePeriod": "90s"},
    }
    pod = pod_of(**spec)
    config = config_of(pod)
    assert config == manifests.worker_config(deployment_with(**spec).spec, "u1")
    assert (config.deployment_uid, config.model.served_name, config.model.max_model_len) == ("u1", "llama", 2048)
    assert (config.draft.method, config.draft.uri) == ("eagle3", "embedded://d")
    assert (config.engine.max_num_seqs, config.engine.threads, config.engine.device) == (4, 2, "cpu")
    assert (config.engine.gpu_memory_utilization, config.engine.sampler) == (0.9, "mss")
    assert worker_of(pod)["command"] == ["specdecode-worker", "serve", "--queue-timeout-seconds=5", "--api-key-metrics"]
    assert config.server.grace_period_seconds == 90
    assert pod["terminationGracePeriodSeconds"] == 107, "the delay, the grace period, and a margin"


def test_every_draft_is_pulled_and_configured_and_rolls_the_pods() -> None:
    drafts = [{"name": "sql", "method": "medusa", "uri": "pvc://heads/sql"}, {"name": "edits", "method": "ngram"}]
    speculation = {"drafts": drafts, "tasks": [{"name": "code", "draft": "sql"}]}
    rendered = template(speculation=speculation)
    config = config_of(rendered["spec"])
    assert [(one.name, one.method, one.uri) for one in config.drafts] == [
        ("sql", "medusa", "pvc://heads/sql"),
        ("edits", "ngram", None),
    ]
    assert container(rendered, "pull")["command"][-2:] == ["embedded://d", "pvc://heads/sql"]
    assert any(volume["name"].endswith("heads") for volume in rendered["spec"]["volumes"])
    plain, more = (deployment_with(speculation=one).spec for one in ({}, {"drafts": drafts}))
    assert manifests.rolling_hash(plain) != manifests.rolling_hash(more)


def test_an_adapter_is_pulled_and_merged_and_rolls_the_pods() -> None:
    adapted: dict[str, Any] = {"model": {"uri": "embedded://t", "adapter": "pvc://adapters/support"}}
    rendered, spec = template(**adapted), deployment_with(**adapted).spec
    config = config_of(rendered["spec"])
    assert config.model.target == spec.model.target == "embedded://t+pvc://adapters/support"
    assert config.model.served_name == "t"
    assert container(rendered, "pull")["command"][-3:-1] == ["embedded://t", "pvc://adapters/support"]
    assert any(volume["name"].endswith("adapters") for volume in rendered["spec"]["volumes"])
    assert manifests.rolling_hash(spec) != manifests.rolling_hash(deployment_with(model={"uri": "embedded://t"}).spec)


@pytest.mark.parametrize(("drafts", "known"), [((), "b8eb683992992326"), (("sql", "edits"), "469dd520d4f93826")])
def test_fields_added_later_do_not_change_the_hash(drafts: tuple[str, ...], known: str) -> None:
    """Fields that came since leave the hash of a spec without them what it was."""
    all_of_them = {
        "sql": {"name": "sql", "method": "medusa", "uri": "pvc://heads/sql"},
        "edits": {"name": "edits", "method": "ngram"},
    }
    speculation = {"draft": {"uri": "embedded://d"}, "drafts": [all_of_them[name] for name in drafts]}
    spec = Spec.model_validate({"model": {"uri": "embedded://t"}, "speculation": speculation})
    assert manifests.rolling_hash(spec) == known


def test_quantised_weights_are_configured_for_each_network() -> None:
    rendered = template(
        engine={"quantization": "fp8"},
        speculation={
            "draft": {"uri": "embedded://d", "quantization": "int4"},
            "drafts": [{"name": "other", "uri": "embedded://o", "quantization": "int8"}],
        },
    )
    config = config_of(rendered["spec"])
    assert [one.quantization for one in (config.model, config.draft, *config.drafts)] == ["fp8", "int4", "int8"]


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf://org/Llama-3@main", "Llama-3"),
        ("hf://org/Llama-3@refs/pr/4", "Llama-3"),
        ("pvc://claim/a/b", "b"),
        ("file:///m/x/", "x"),
        ("embedded://e", "e"),
    ],
)
def test_served_name_is_the_last_part_without_a_revision(uri: str, name: str) -> None:
    assert config_of(pod_of(model={"uri": uri})).model.served_name == name


@pytest.mark.parametrize("amount", ["many", "NaN", "-inf", "1_000", "1e9999999", {"cores": 1}], ids=str)
def test_an_amount_that_is_no_quantity_is_refused(amount: Any) -> None:
    with pytest.raises(SpecError, match=r"jobTemplate: limits.cpu is .*; write cores such as"):
        whole_cores({"cpu": amount}, "jobTemplate: limits")
    with pytest.raises(SpecError, match=r"modelCache.emptyDir.sizeLimit is .*; write an amount such as"):
        template(modelCache={"emptyDir": {"sizeLimit": amount}})


def test_the_plan_is_mounted_as_a_folder() -> None:
    mounts = {item["mountPath"]: item for item in container(template(), "worker")["volumeMounts"]}
    assert "subPath" not in mounts["/etc/specdecode/plan"]
    assert environment(template())[Env.plan_path] == "/etc/specdecode/plan/plan.json"


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        (None, {"emptyDir": {"sizeLimit": "64Gi"}}),
        (CLAIM, CLAIM),
        ({"hostPath": {"path": "/models"}}, {"hostPath": {"path": "/models"}}),
    ],
)
def test_the_model_cache_volume_follows_the_spec(cache: dict[str, Any] | None, volume: dict[str, Any]) -> None:
    rendered = template(modelCache=cache)
    assert {"name": "model-cache", **volume} in rendered["spec"]["volumes"]


def test_only_pull_writes_models() -> None:
    """A worker cannot change the models that other pods read from the same cache."""
    mounts = {
        name: next(one for one in container(template(), name)["volumeMounts"] if one["name"] == "model-cache")
        for name in ("pull", "worker")
    }
    assert mounts["worker"] == {**mounts["pull"], "readOnly": True}
    assert "readOnly" not in mounts["pull"]


def test_compiled_kernels_stay_in_the_pod_and_scratch_space_is_bounded() -> None:
    rendered = template(modelCache=CLAIM)
    volumes = {volume["name"]: volume for volume in rendered["spec"]["volumes"]}
    assert all(volumes[name]["emptyDir"]["sizeLimit"] for name in ("compiled", "tmp", "shm"))
    (mount,) = [one for one in container(rendered, "worker")["volumeMounts"] if one["name"] == "compiled"]
    for variable in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert environment(rendered)[variable].startswith(mount["mountPath"])
    mine = {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}}]}}
    larger = template(workers={"template": mine})["spec"]["volumes"]
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}} in larger


def test_claims_of_models_are_mounted_once_and_read_only() -> None:
    spec = {"model": {"uri": "pvc://big/target"}, "speculation": {"draft": {"uri": "pvc://big/draft"}}}
    mounts = [item["mountPath"] for item in container(template(**spec), "pull")["volumeMounts"]]
    assert mounts.count("/mnt/pvc/big") == 1


def test_the_claim_of_new_drafts_is_mounted_read_only_and_captures_have_a_bounded_folder() -> None:
    spec = {"speculation": {"draft": {"uri": "pvc://drafts/d"}}, "distillation": {"storage": {"uri": "pvc://drafts"}}}
    rendered = template(**spec)
    assert [one for one in container(rendered, "worker")["volumeMounts"] if one["name"].startswith("claim-")] == [
        {"name": "claim-drafts", "mountPath": "/mnt/pvc/drafts", "readOnly": True}
    ]
    assert {"name": "captures", "emptyDir": {"sizeLimit": "3Gi"}} in rendered["spec"]["volumes"]
    config = config_of(rendered["spec"])
    mounts = {one["mountPath"]: one["name"] for one in container(rendered, "worker")["volumeMounts"]}
    assert mounts[str(config.capture_dir)] == "captures"
    assert "captures" not in [one["name"] for one in container(rendered, "pull")["volumeMounts"]]


def test_pull_gets_the_hub_token_and_the_worker_does_not() -> None:
    rendered = template(model={"tokenSecretRef": {"name": "hub"}})
    pull = {item["name"]: item for item in container(rendered, "pull")["env"]}
    assert pull["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert "HF_TOKEN" not in environment(rendered)


def test_every_child_is_owned_and_blocks_nothing() -> None:
    children = loop_over().poll().children
    kinds = ["ConfigMap", "Service", "Service", "PodDisruptionBudget", "Deployment"]
    assert [child["kind"] for child in children] == kinds
    for child in children:
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("u1", True, False)


def test_prefetch_pulls_on_labelled_nodes_as_workers_do() -> None:
    """Its pods reserve no worker's resources, and have the volumes of `pull` alone."""
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    spec = {**PREFETCH, "workers": {"template": {"spec": {"tolerations": tolerations}}}}
    rendered = template(**spec)
    made = manifests.prefetch_daemon_set(deployment_with(**spec), rendered)
    pod = made["spec"]["template"]["spec"]
    assert made["spec"]["selector"]["matchLabels"].items() <= made["spec"]["template"]["metadata"]["labels"].items()
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"models": "llama"}, tolerations)
    (pull,) = pod["initContainers"]
    assert pull["command"] == container(rendered, "pull")["command"]
    assert pull["resources"]["requests"]["memory"] == "512Mi"
    assert {"name": "model-cache", "hostPath": {"path": "/models"}} in pod["volumes"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in pull["volumeMounts"]}
    assert pod["securityContext"] == rendered["spec"]["securityContext"]
    with pytest.raises(SpecError, match="Pod Security level privileged"):
        manifests.prefetch_daemon_set(deployment_with(**spec), template(modelCache=CLAIM))


def test_names_of_children_fit_labels() -> None:
    long = replace(deployment_with(), name="n" * 45)
    child = manifests.workload(long, {}, "h", 1)
    assert len(child["metadata"]["name"]) <= 63 - len("-12345678ab"), "a ReplicaSet's name becomes a label's value"


# --- the user's template ------------------------------------------------------------------------------------------


def test_containers_merge_by_name() -> None:
    overlay = {
        "metadata": {"annotations": {"a": "b"}, "labels": {"specdecode.io/name": "stolen", "team": "x"}},
        "spec": {
            "nodeSelector": {"disk": "fast"},
            "containers": [
                {"name": "worker", "env": [{"name": "HOME", "value": "/h"}, {"name": "EXTRA", "value": "1"}]},
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    rendered = template(workers={"template": overlay})
    assert [item["name"] for item in rendered["spec"]["containers"]] == ["worker", "sidecar"]
    assert environment(rendered)["HOME"] == "/h"
    assert environment(rendered)["EXTRA"] == "1"
    assert Env.config in environment(rendered)
    assert rendered["metadata"]["labels"]["specdecode.io/name"] == "demo", "the selector's labels are ours"
    assert rendered["metadata"]["labels"]["team"] == "x"


FIELD, SECRET = {"fieldRef": {"fieldPath": "x"}}, {"secretKeyRef": {"name": "s", "key": "k"}}
HTTP, EXEC, CLAIMED = {"httpGet": {"path": "/"}}, {"exec": {"command": []}}, {"resourceClaimName": "b"}


@pytest.mark.parametrize(
    ("field", "base", "overlay"),
    [
        ("preStop", EXEC, {"sleep": {"seconds": 3}}),
        ("volumes", [{"name": "tmp", "emptyDir": {}}], [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]),
        ("env", [{"name": "A", "value": "1"}], [{"name": "A", "valueFrom": FIELD}]),
        ("env", [{"name": "A", "valueFrom": FIELD}], [{"name": "A", "valueFrom": SECRET}]),
        ("resourceClaims", [{"name": "a", **CLAIMED}], [{"name": "a", "resourceClaimTemplateName": "c"}]),
    ],
)
def test_of_fields_that_exclude_each_other_the_users_alone_stays(field: str, base: Any, overlay: Any) -> None:
    assert merged({field: base}, {field: overlay}) == {field: overlay}


@pytest.mark.parametrize(
    ("field", "base", "overlay", "made"),
    [
        ("livenessProbe", {**HTTP, "periodSeconds": 9}, EXEC, {**EXEC, "periodSeconds": 9}),
        ("livenessProbe", {"httpGet": {"path": "/", "port": 1}}, {"httpGet": {"path": "/x"}},
         {"httpGet": {"path": "/x", "port": 1}}),
        ("livenessProbe", HTTP, {"exec": None, "timeoutSeconds": 2}, {**HTTP, "timeoutSeconds": 2}),
        ("volumes", [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}], [{"name": "tmp", "emptyDir": {"medium": "M"}}],
         [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi", "medium": "M"}}]),
        ("resources", {"limits": {"cpu": 1}, "claims": []}, {"limits": None}, {"claims": []}),
        ("command", ["x", "y"], ["z"], ["z"]),
    ],
    ids=["other handler", "same handler", "no handler", "same kind of volume", "null", "list without names"],
)  # fmt: skip
def test_the_rest_of_a_field_stays(field: str, base: Any, overlay: Any, made: Any) -> None:
    assert merged({field: base}, {field: overlay}) == {field: made}


def test_every_item_that_kubernetes_tells_apart_stays() -> None:
    spread = [{"topologyKey": "zone", "whenUnsatisfiable": when} for when in ("DoNotSchedule", "ScheduleAnyway")]
    ports = [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53, "name": "dns"}]
    made = merged(
        {"ports": [{"containerPort": 53, "protocol": "TCP"}]}, {"topologySpreadConstraints": spread, "ports": ports}
    )
    assert made["topologySpreadConstraints"] == spread
    assert made["ports"] == [{"containerPort": 53, "protocol": "TCP", "name": "dns"}, ports[0]]


def test_a_template_beyond_the_bound_is_refused() -> None:
    with pytest.raises(SpecError, match="bytes"):
        template(workers={"template": {"metadata": {"annotations": {"a": "x" * 30_000}}}})


# --- stability ----------------------------------------------------------------------------------------------------


def decided(
    memory: Session, defaults: Defaults, observed: Observation | None = None, **spec: Any
) -> tuple[Decision, Session]:
    observed = observed or Observation(workload=None, workers=(), session=memory)
    return decide(deployment_with(**spec), observed, defaults, now=1000)


def pod(decision: Decision) -> Any:
    workers = ("Deployment", "demo-worker")
    (workload,) = (one for one in decision.children if (one["kind"], one["metadata"]["name"]) == workers)
    return workload["spec"]["template"]


LIVE: list[dict[str, Any]] = [
    {"speculation": {"mode": "Static"}},
    {"speculation": {"depth": {"min": 1, "max": 7, "initial": 2}}},
    {"speculation": {"stability": "Low", "pin": "none"}},
    {"speculation": {"tasks": [{"name": "code"}]}},
    {"scaling": {"minReplicas": 2, "maxReplicas": 9}},
    {"replicas": 3},
    {"distillation": {"capture": {"percent": 50}, "trigger": {"minConversations": 9}}},
    {"distillation": {"steps": 9, "promptsConfigMapRef": {"name": "g"}, "jobTemplate": {"spec": {}}}},
    {"draftRollout": {"mode": "Manual"}},
    {"paused": False},
    {"router": {"replicas": 2}},
    {"prefill": {"replicas": 1}},
    {"workers": {"strategy": {"maxSurge": "25%"}}},
]
ROLLING: list[dict[str, Any]] = [
    {"engine": {"dtype": "float32"}},
    {"engine": {"quantization": "int8"}},
    {"speculation": {"draft": {"uri": "embedded://other"}}},
    {"speculation": {"draft": {"uri": "embedded://d", "quantization": "int4"}}},
    {"speculation": {"draft": {"uri": "embedded://d", "placement": "Own"}}},
    {"engine": {"maxNumSeqs": 8}},
    {"workers": {"template": {"spec": {"containers": [{"name": "worker", "env": [{"name": "A", "value": "b"}]}]}}}},
    {"workers": {"accelerator": {"count": 1}}},
    {"apiKeysSecretRef": {"name": "keys"}},
    {"imagePullSecrets": [{"name": "registry"}]},
    {"model": {"uri": "embedded://m", "chatTemplate": "{{ messages }}"}},
    {"engine": {"extraArgs": ["--api-key-metrics"]}},
    {"tlsSecretRef": {"name": "t"}},
    {"workers": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}},
    {"drain": {"gracePeriod": "61s"}},
    {"modelCache": {"hostPath": {"path": "/x"}}},
    {"distillation": {"storage": {"uri": "pvc://drafts"}}},
    {"distillation": {"storage": {"uri": "s3://drafts", "secretRef": {"name": "key"}}}},
]


@pytest.mark.parametrize("change", LIVE, ids=str)
def test_live_fields_do_not_change_the_pod_template(change: dict[str, Any]) -> None:
    first, memory = decided(Session(), DEFAULTS)
    second, _ = decided(memory, UPGRADED, **change)
    assert pod(second) == pod(first), "even after an upgrade of the operator"


@pytest.mark.parametrize("change", ROLLING, ids=str)
def test_rolling_fields_change_the_pod_template(change: dict[str, Any]) -> None:
    first, memory = decided(Session(), DEFAULTS)
    second, _ = decided(memory, DEFAULTS, **change)
    assert pod(second) != pod(first)


def test_an_upgrade_of_the_operator_does_not_roll_pods() -> None:
    first, memory = decided(Session(), DEFAULTS)
    second, memory = decided(memory, UPGRADED)
    assert pod(second) == pod(first)
    assert second.shown.image == "localhost/worker:1"
    third, _ = decided(memory, UPGRADED, drain={"gracePeriod": "61s"})
    assert third.shown.image == "localhost/worker:2", "with the next change of the spec it may"


def test_update_policy_automatic_rolls_pods_on_an_operator_upgrade() -> None:
    _, memory = decided(Session(), DEFAULTS, workers={"updatePolicy": "Automatic"})
    second, _ = decided(memory, UPGRADED, workers={"updatePolicy": "Automatic"})
    assert second.shown.image == "localhost/worker:2"


def test_after_a_loss_of_state_the_template_is_read_from_the_workload() -> None:
    first, memory = decided(Session(), DEFAULTS)
    live = workload_with(
        template=pod(first), spec_hash=memory.learned.template.spec_hash if memory.learned.template else ""
    )
    lost = Session(learned=LearnedState(uid="u1"), stored=False)
    second, _ = decided(lost, UPGRADED, Observation(workload=live, workers=(), session=lost))
    assert pod(second) == pod(first)


def test_an_unchanged_plan_has_the_same_version() -> None:
    first, memory = decided(Session(), DEFAULTS)
    second, _ = decided(memory, DEFAULTS)
    assert first.plan == second.plan
    assert Plan.model_validate_json(first.children[0]["data"]["plan.json"]) == first.plan


# --- fields of the pod ------------------------------------------------------------------------------------------------


def mount_of(pod: Json, folder: str) -> tuple[Json, Json]:
    """Return the mount at a folder and its volume."""
    mount = next(mount for mount in worker_of(pod)["volumeMounts"] if mount["mountPath"] == folder)
    return mount, next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])


@pytest.mark.parametrize("name", ["worker", "router", "prefetch", "training", "deletion"])
def test_every_pod_meets_the_restricted_security_profile(name: str) -> None:
    deployment = deployment_with(**PREFETCH, router={"replicas": 2})
    template = manifests.pod_template(deployment, DEFAULTS)
    pod = {
        "worker": lambda: template,
        "router": lambda: manifests.router_workload(deployment, DEFAULTS)["spec"]["template"],
        "prefetch": lambda: manifests.prefetch_daemon_set(deployment, template)["spec"]["template"],
        "training": lambda: manifests.distillation_job(deployment, RUN, DEFAULTS)["spec"]["template"],
        "deletion": lambda: manifests.deletion_job(deployment, RUN, DEFAULTS)["spec"]["template"],
    }[name]()["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is (name == "router")
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}


# --- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "size", "limits", "device", "ranks"),
    [
        ({"count": 1}, None, {"nvidia.com/gpu": 1}, "cuda", 1),
        ({"count": 4}, None, {"nvidia.com/gpu": 4}, "cuda", 4),
        ({"count": 4}, 4, {"nvidia.com/gpu": 4}, "cuda", 4),
        ({"count": None}, None, {"nvidia.com/gpu": 1}, "cuda", 1),
        ({"count": None}, 4, {"nvidia.com/gpu": 4}, "cuda", 4),
        ({"resource": "nvidia.com/mig-1g.10gb", "count": 1}, None, {"nvidia.com/mig-1g.10gb": 1}, "cuda", 1),
        ({"count": 0}, None, {}, "cpu", 1),
        ({"count": 0}, 2, {}, "cpu", 2),
    ],
)
def test_accelerator_sets_limits_device_and_ranks(
    accelerator: Json, size: int | None, limits: Json, device: str, ranks: int
) -> None:
    pod = pod_of(workers={"accelerator": accelerator}, engine={"tensorParallelSize": size})
    assert worker_of(pod)["resources"].get("limits", {}) == limits
    assert not pod["initContainers"][0]["resources"], "pulling needs no device"
    assert (config_of(pod).engine.device, config_of(pod).engine.tensor_parallel_size) == (device, ranks)


@pytest.mark.parametrize(
    ("workers", "limits", "ranks"),
    [
        ({"accelerator": {"count": 1}}, {"nvidia.com/gpu": 2}, 1),
        ({"accelerator": {"resource": "example.com/npu", "count": 4}}, {"example.com/npu": 5}, 4),
        ({"accelerator": {"count": 0}}, {}, 1),
    ],
)
def test_a_draft_on_its_own_device_takes_one_more(workers: Json, limits: Json, ranks: int) -> None:
    """The target is still split over the devices that were asked for; on CPUs there is none to ask for."""
    pod = pod_of(workers=workers, speculation={"draft": {"uri": "embedded://d", "placement": "Own"}})
    assert worker_of(pod)["resources"].get("limits", {}) == limits
    assert config_of(pod).engine.tensor_parallel_size == ranks
    assert config_of(pod).draft.placement == "own"


def test_accelerator_is_added_to_other_limits() -> None:
    pod = pod_of(workers={"accelerator": {"count": 2}, "resources": {"limits": {"memory": "8Gi", "cpu": 4}}})
    assert worker_of(pod)["resources"]["limits"] == {"memory": "8Gi", "cpu": 4, "nvidia.com/gpu": 2}
    assert config_of(pod).engine.threads is None, "threads of a CPU do not matter on a GPU"
    assert config_of(pod).engine.max_num_batched_tokens == 2048
    assert config_of(pod_of()).engine.max_num_batched_tokens == 512


def test_resource_claims_reach_pod_and_container_and_the_worker_looks_for_its_device() -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "one-h100"}
    container = {"name": "worker", "resources": {"claims": [{"name": "gpu"}]}}
    template = {"spec": {"resourceClaims": [claim], "containers": [container]}}
    workers = {"accelerator": {"count": 0}, "resources": {"limits": {"cpu": 2}}, "template": template}
    pod = pod_of(workers=workers)
    assert pod["resourceClaims"] == [claim]
    assert worker_of(pod)["resources"] == {"limits": {"cpu": 2}, "claims": [{"name": "gpu"}]}
    assert (config_of(pod).engine.device, config_of(pod).engine.threads) == ("auto", None)


@pytest.mark.parametrize(
    ("quantity", "value"),
    [("2k", 2000), ("1Ki", 1024), ("1e3", 1000), ("500m", 0.5), (3, 3), (".5", 0.5), ("1e999999", 2.0**63)],
)
def test_every_quantity_of_kubernetes_is_read(quantity: Any, value: float) -> None:
    assert float(quantity_value(quantity)) == value
    pod, threads = pod_of(workers={"resources": {"limits": {"cpu": quantity}}}), max(1, min(1024, int(value)))
    assert config_of(pod).engine.threads == threads
    assert {"name": "OMP_NUM_THREADS", "value": str(threads)} in worker_of(pod)["env"]


# --- scheduling ----------------------------------------------------------------------------------------------------

SCHEDULING: Json = {
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "priorityClassName": "high",
    "serviceAccountName": "reader",
    "runtimeClassName": "nvidia",
}


def test_scheduling_of_the_template_reaches_the_pod() -> None:
    pod = pod_of(workers={"template": {"spec": SCHEDULING}})
    assert {name: pod[name] for name in SCHEDULING} == SCHEDULING
    assert pod["automountServiceAccountToken"] is False
    assert not SCHEDULING.keys() & pod_of().keys(), "absent fields are left to Kubernetes"


@pytest.mark.parametrize("name", ["SPECDECODE_CONFIG", "SPECDECODE_PLAN_PATH", "POD_NAME"])
def test_variables_that_the_operator_needs_are_refused(name: str) -> None:
    template = {"spec": {"containers": [{"name": "worker", "env": [{"name": name, "value": "x"}]}]}}
    with pytest.raises(SpecError, match=f"must not set {name}"):
        pod_of(workers={"template": template})


def test_all_pods_have_the_credentials_of_the_registry() -> None:
    spec: Json = {"imagePullSecrets": [{"name": "registry"}], "distillation": {"storage": {"uri": "pvc://drafts"}}}
    job = manifests.distillation_job(deployment_with(**spec), RUN, DEFAULTS)
    routers = manifests.router_workload(deployment_with(**spec), DEFAULTS)
    for pod in (pod_of(**spec), *(one["spec"]["template"]["spec"] for one in (job, routers))):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]


# --- secrets -------------------------------------------------------------------------------------------------------


PROXY: Json = {
    "workers": {
        "template": {
            "spec": {
                "volumes": [
                    {"name": "ca", "configMap": {"name": "ca"}},
                    {"name": "other", "configMap": {"name": "other"}},
                    {"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}},
                ],
                "containers": [
                    {
                        "name": "worker",
                        "env": [
                            {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
                            {"name": "HOME", "value": "/home"},
                            {"name": "CORES", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                            {"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"},
                        ],
                        "envFrom": [{"configMapRef": {"name": "mirror"}}],
                        "volumeMounts": [
                            {"name": "ca", "mountPath": "/ca", "readOnly": True},
                            {"name": "tmp", "mountPath": "/more"},
                        ],
                    },
                    {"name": "sidecar", "image": "s", "volumeMounts": [{"name": "other", "mountPath": "/other"}]},
                ],
            }
        },
    }
}


@pytest.mark.parametrize(
    ("pod", "name"), [("worker", "worker"), ("worker", "pull"), ("job", "pull"), ("job", JOB_CONTAINER)]
)
def test_proxies_authorities_and_mirrors_reach_every_container_that_downloads(pod: str, name: str) -> None:
    spec = {"distillation": {"storage": {"uri": "pvc://drafts"}}, **PROXY}
    job = manifests.distillation_job(deployment_with(**spec), RUN, DEFAULTS)
    made = {"worker": pod_of(**spec), "job": job["spec"]["template"]["spec"]}[pod]
    container = next(one for one in (*made["initContainers"], *made["containers"]) if one["name"] == name)
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert len(variables) == len(container["env"])
    assert (variables["HTTPS_PROXY"], variables["SSL_CERT_FILE"]) == ("http://proxy:3128", "/ca/ca.crt")
    assert variables["HOME"] == ("/home" if name == "worker" else "/tmp"), "elsewhere the operator's own stay"
    assert ("CORES" in variables) == (name == "worker"), "it is of the worker's container"
    assert container["envFrom"] == [{"configMapRef": {"name": "mirror"}}]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts["/ca"] == "ca"
    assert ("/more" in mounts) == (name == "worker"), "the operator's volumes are mounted where it says"
    assert "/other" not in mounts
    volumes = [one["name"] for one in made["volumes"]]
    assert len(set(volumes)) == len(volumes)
    assert set(mounts.values()) <= set(volumes)


def test_admin_tokens_are_a_folder_and_not_in_the_environment() -> None:
    pod = pod_of()
    folder = config_of(pod).server.admin_tokens_path
    mount, volume = mount_of(pod, folder)
    assert volume["secret"]["secretName"] == "demo-tokens"
    assert mount["readOnly"]
    assert "subPath" not in mount, "a file by subPath is never updated"
    assert Env.admin_token not in {variable["name"] for variable in worker_of(pod)["env"]}


def test_tokens_secret_has_one_token_a_line_the_current_one_first() -> None:
    scopes = manifests.TokenScope
    secret = manifests.tokens_secret(deployment_with(), {scopes.operator: ["new", "old"], scopes.router: ["r"]})
    assert secret["metadata"]["name"] == "demo-tokens"
    assert secret["stringData"] == {"operator": "new\nold\n", "router": "r\n"}


def test_api_keys_are_a_folder_or_one_file_of_it() -> None:
    folder = pod_of(apiKeysSecretRef={"name": "keys"})
    path = config_of(folder).server.api_keys_path
    assert mount_of(folder, path)[1]["secret"] == {"secretName": "keys", "defaultMode": 0o440}
    one = pod_of(apiKeysSecretRef={"name": "keys", "key": "all.txt"})
    assert config_of(one).server.api_keys_path == f"{path}/all.txt"
    assert mount_of(one, path)[1]["secret"]["items"] == [{"key": "all.txt", "path": "all.txt"}]
    assert config_of(pod_of()).server.api_keys_path is None


def test_tls_is_mounted_probed_and_served() -> None:
    deployment = deployment_with(tlsSecretRef={"name": "cert"})
    pod = pod_of(tlsSecretRef={"name": "cert"})
    server = config_of(pod).server
    assert (server.tls_cert_file, server.tls_key_file) == ("/etc/specdecode/tls/tls.crt", "/etc/specdecode/tls/tls.key")
    assert mount_of(pod, "/etc/specdecode/tls")[1]["secret"]["secretName"] == "cert"
    probes = [worker_of(pod)[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["scheme"] for probe in probes} == {"HTTPS"}
    (port,) = manifests.service(deployment)["spec"]["ports"]
    assert (port["name"], port["port"], port["targetPort"]) == ("https", 443, 8000)
    assert manifests.service_url("ns", "demo", tls=True) == "https://demo.ns.svc/v1"


def test_without_tls_everything_is_plain_http() -> None:
    assert "scheme" not in worker_of(pod_of())["readinessProbe"]["httpGet"]
    (port,) = manifests.service(deployment_with())["spec"]["ports"]
    assert (port["name"], port["port"]) == ("http", 80)
    assert manifests.service_url("ns", "demo") == "http://demo.ns.svc/v1"


# --- engine --------------------------------------------------------------------------------------------------------


def test_defaults_of_the_engine_are_those_of_the_worker() -> None:
    config = config_of(pod_of(engine={"maxNumSeqs": EngineConfig().max_num_seqs}))
    assert config.engine == EngineConfig(device="cpu", block_port=Port.blocks)
    assert config.server == ServerConfig(admin_tokens_path=config.server.admin_tokens_path)


@pytest.mark.parametrize("engine", [{}, {"maxNumSeqs": 16, "maxNumBatchedTokens": 512, "memoryPercent": 80}], ids=str)
@pytest.mark.parametrize("count", [0, 1])
def test_a_worker_reads_the_limits_of_the_spec_on_every_device(count: int, engine: Json) -> None:
    """A worker on a GPU has other defaults than a resource."""
    spec: Json = {"workers": {"accelerator": {"count": count}}, "engine": engine}
    read = config_of(pod_of(**spec))
    assert read == manifests.worker_config(deployment_with(**spec).spec, "u1")
    assert (read.engine.max_num_seqs, read.engine.gpu_memory_utilization) == (16, 0.8)


# --- other children ------------------------------------------------------------------------------------------------


CLAIMS = {"accelerator": {"count": 0}, "template": {"spec": {"resourceClaims": [{"name": "gpu"}]}}}


@pytest.mark.parametrize(
    ("workers", "surge", "unavailable"),
    [
        ({"accelerator": {"count": 1}}, 0, 1),
        (CLAIMS, 0, 1),
        ({"accelerator": {"count": 0}}, 1, 0),
        ({"accelerator": {"count": 1}, "strategy": {"maxSurge": 1}}, 1, 0),
        ({"accelerator": {"count": 1}, "strategy": {"maxSurge": 0}}, 0, 1),
        ({"accelerator": {"count": 1}, "strategy": {"maxUnavailable": 0}}, 1, 0),
        ({"accelerator": {"count": 0}, "strategy": {"maxUnavailable": "25%"}}, 0, "25%"),
        ({"accelerator": {"count": 0}, "strategy": {"maxSurge": "25%", "maxUnavailable": 2}}, "25%", 2),
    ],
)
def test_a_rolling_update_needs_no_spare_device_by_default(
    workers: Json, surge: int | str, unavailable: int | str
) -> None:
    workload = manifests.workload(deployment_with(workers=workers), {}, "h", 1)
    rolling = workload["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": surge, "maxUnavailable": unavailable}


def test_broken_workers_can_always_be_evicted() -> None:
    budget = manifests.budget(deployment_with())["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_headless_service_has_both_ports_of_the_workers() -> None:
    spec = manifests.headless_service(deployment_with())["spec"]
    assert spec["clusterIP"] == "None"
    assert [port["name"] for port in spec["ports"]] == ["http", "admin"]
    assert spec["selector"] == manifests.service(deployment_with())["spec"]["selector"]


def test_child_names_are_those_of_all_children() -> None:
    deployment = deployment_with(**PREFETCH)
    children = [
        manifests.prefetch_daemon_set(deployment, manifests.pod_template(deployment, DEFAULTS)),
        manifests.service(deployment),
        manifests.headless_service(deployment),
        manifests.budget(deployment),
        manifests.workload(deployment, {}, "h", 1),
        manifests.prefill_workload(deployment, manifests.pod_template(deployment, DEFAULTS), "h", 1),
        manifests.state_config_map(deployment, {}),
        manifests.tokens_secret(deployment, {}),
        manifests.router_workload(deployment, DEFAULTS),
        manifests.demand_config_map(deployment),
    ]
    names = {child["metadata"]["name"] for child in children} | {manifests.plan_name("demo")}
    assert names == set(manifests.child_names("demo"))
    assert len(manifests.child_names("demo")) == len(names)


def test_claims_with_dots_and_long_names_have_valid_volumes() -> None:
    claims = ("models.v1", "x" * 63)
    for claim in claims:
        volumes = pod_of(model={"uri": f"pvc://{claim}/llama"})["volumes"]
        (name,) = [volume["name"] for volume in volumes if "persistentVolumeClaim" in volume]
        assert len(name) <= 63
        assert "." not in name


# --- templates that cannot be merged ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"spec": "text"}, r"workers\.template\.spec must be an object, not 'text'"),
        ({"spec": {"containers": "text"}}, r"workers\.template\.spec\.containers must be a list"),
        ({"spec": {"containers": ["text"]}}, r"spec\.containers\[0\] must be an object with a name"),
        ({"spec": {"containers": [{"image": "x"}]}}, r"spec\.containers\[0\] needs a name"),
        ({"spec": {"containers": [{"name": ["x"]}]}}, r"spec\.containers\[0\]\.name must be a text or a number"),
        ({"spec": {"containers": [{"name": "worker", "ports": ["8000"]}]}}, r"ports\[0\] must be an object"),
        ({"spec": {"containers": [{"name": "worker", "resources": 1}]}}, r"resources must be an object"),
        ({"spec": {"volumes": [{"name": "a", "x": 1}, {"name": "a", "items": 1}, 7]}}, r"volumes\[2\] must be an"),
        ({"metadata": {"labels": "text"}}, r"workers\.template\.metadata\.labels must be an object"),
        ({"spec": {"securityContext": []}}, r"securityContext must be an object"),
    ],
)
def test_template_of_a_wrong_type_is_refused_by_path(template: Json, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        pod_of(workers={"template": template})


@pytest.mark.parametrize("template", [{"spec": None}, {"metadata": None}, {"spec": {"containers": None}}])
def test_removed_parts_leave_a_template_with_the_labels_of_the_selector(template: Json) -> None:
    pod = manifests.pod_template(deployment_with(workers={"template": template}), DEFAULTS)
    assert pod["metadata"]["labels"] == manifests.selector("demo")
    assert isinstance(manifests.resolved_image(pod), str)


@pytest.mark.parametrize("spec", [None, {"containers": None, "initContainers": None}, {"volumes": None}], ids=str)
def test_other_children_of_a_template_with_removed_parts_are_made_or_refused(spec: Json | None) -> None:
    deployment, pod = prefetching({"spec": spec})
    assert manifests.prefill_workload(deployment, pod, "h", 1)["metadata"]["name"] == "demo-prefill"
    with pytest.raises(SpecError, match="prefetchNodeSelector: it needs"):
        manifests.prefetch_daemon_set(deployment, pod)


def test_a_pull_without_a_security_context_leaves_prefetching_without_one() -> None:
    made = manifests.prefetch_daemon_set(
        *prefetching({"spec": {"initContainers": [{"name": "pull", "securityContext": None}]}})
    )
    pod = made["spec"]["template"]["spec"]
    assert not [one for one in (*pod["initContainers"], *pod["containers"]) if "securityContext" in one]


def prefetching(template: Json) -> tuple[Deployment, Json]:
    """Return a deployment with this template that fills the model caches of nodes, and the template of its pods."""
    deployment = deployment_with(**PREFETCH, workers={"template": template})
    return deployment, manifests.pod_template(deployment, DEFAULTS)


def test_annotations_may_have_the_names_of_lists() -> None:
    annotations = {"env": "prod", "ports": "none"}
    assert merged({}, {"metadata": {"annotations": annotations}})["metadata"]["annotations"] == annotations
