"""Tests of the children as pure functions of the spec, and of what may never change a live pod template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.decision.decide import decide
from specdecode_operator.errors import SpecError
from specdecode_operator.manifests.pods import merged, whole_cores
from specdecode_operator.state.learned import LearnedState, Session
from specdecode_operator.types import Decision, Defaults, Observation
from specdecode_worker.contract import Env, Plan, WorkerConfig
from support.operators.fleet import DEFAULTS, deployment_with, loop_over, workload_with

UPGRADED = Defaults(worker_image="localhost/worker:2", worker_image_pull_policy="Always")

CLAIM = {"persistentVolumeClaim": {"claimName": "shared"}}


def template(**spec: Any) -> dict[str, Any]:
    return manifests.pod_template(deployment_with(**spec), DEFAULTS)


def container(rendered: dict[str, Any], name: str) -> dict[str, Any]:
    containers = rendered["spec"]["containers"] + rendered["spec"]["initContainers"]
    return next(item for item in containers if item["name"] == name)


def environment(rendered: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container(rendered, "worker")["env"]}


def config_of(rendered: dict[str, Any]) -> WorkerConfig:
    return WorkerConfig.model_validate_json(environment(rendered)[Env.config])


def test_the_worker_config_in_the_environment_is_complete() -> None:
    spec = {
        "model": {"uri": "hf://org/Llama@v1", "servedName": "llama"},
        "engine": {"dtype": "float32", "maxModelLen": 2048, "maxNumSeqs": 4, "kvCacheTokens": 4096},
        "workers": {"resources": {"limits": {"cpu": "2500m"}}},
        "drain": {"endpointDelay": "7s", "gracePeriod": "90s"},
    }
    config = config_of(template(**spec))
    assert config == manifests.worker_config(deployment_with(**spec).spec, "u1")
    assert (config.deployment_uid, config.model.served_name, config.model.max_model_len) == ("u1", "llama", 2048)
    assert (config.draft.method, config.draft.uri) == ("eagle3", "embedded://d")
    assert (config.engine.max_num_seqs, config.engine.threads, config.engine.device) == (4, 2, "cpu")
    assert config.server.grace_period_seconds == 90


def test_every_draft_is_pulled_and_configured_and_rolls_the_pods() -> None:
    drafts = [{"name": "sql", "method": "medusa", "uri": "pvc://heads/sql"}, {"name": "edits", "method": "ngram"}]
    speculation = {"drafts": drafts, "tasks": [{"name": "code", "draft": "sql"}]}
    rendered = template(speculation=speculation)
    config = config_of(rendered)
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
    config = config_of(rendered)
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
    config = config_of(rendered)
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
    assert config_of(template(model={"uri": uri})).model.served_name == name


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


def test_termination_grace_covers_delay_and_grace_period_with_a_margin() -> None:
    rendered = template(drain={"endpointDelay": "7s", "gracePeriod": "90s"})
    assert rendered["spec"]["terminationGracePeriodSeconds"] == 107


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
    config = config_of(rendered)
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
    spec = {
        "modelCache": {"hostPath": {"path": "/models"}},
        "prefetchNodeSelector": {"models": "llama"},
        "workers": {"template": {"spec": {"tolerations": tolerations}}},
    }
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


def test_null_removes_a_field_and_lists_without_names_are_replaced() -> None:
    base = {"a": 1, "command": ["x", "y"], "env": [{"name": "K", "value": "1"}]}
    assert merged(base, {"a": None, "command": ["z"]}) == {"command": ["z"], "env": [{"name": "K", "value": "1"}]}


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
    ("base", "overlay", "made"),
    [
        ({**HTTP, "periodSeconds": 9}, EXEC, {**EXEC, "periodSeconds": 9}),
        ({"httpGet": {"path": "/", "port": 1}}, {"httpGet": {"path": "/x"}}, {"httpGet": {"path": "/x", "port": 1}}),
        (HTTP, {"exec": None, "timeoutSeconds": 2}, {**HTTP, "timeoutSeconds": 2}),
    ],
)
def test_what_a_probe_says_beside_its_handler_stays(
    base: dict[str, Any], overlay: dict[str, Any], made: dict[str, Any]
) -> None:
    assert merged({"livenessProbe": base}, {"livenessProbe": overlay}) == {"livenessProbe": made}


def test_the_same_kind_of_volume_is_merged() -> None:
    base, overlay = ({"volumes": [{"name": "tmp", "emptyDir": one}]} for one in ({"sizeLimit": "1Gi"}, {"medium": "M"}))
    assert merged(base, overlay) == {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi", "medium": "M"}}]}


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
