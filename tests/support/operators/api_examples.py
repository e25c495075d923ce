"""Specs that are valid, invalid or misspelled: examples for the models and for the API server's rules."""

from __future__ import annotations

import json
from typing import Any

from support.operators.fleet import SPEC, deep


def merging(*merge: dict[str, Any], **task: Any) -> dict[str, Any]:
    """Return a speculation whose task merges drafts."""
    drafts = [{"name": "lookup", "method": "ngram"}, {"name": "sql", "uri": "file:///m"}]
    return {"drafts": drafts, "tasks": [{"name": "edits", "merge": list(merge), **task}]}


GOOD: list[dict[str, Any]] = [
    {},
    {"speculation": {"method": "none", "draft": None}},
    {"speculation": {"depth": {"min": 2, "initial": 2, "max": 2}}},
    {"scaling": {"minReplicas": 2, "maxReplicas": 2}},
    {"scaling": {"minReplicas": 0, "idleSeconds": 60}, "router": {"replicas": 2}},
    {"scaling": {"minReplicas": 0, "owner": "External"}},
    {"router": {"replicas": 1, "autoscaled": True, "suspicion": {"minSeconds": 0.5, "maxSeconds": 0.5}}},
    {"router": {"resources": {"limits": {"memory": "2Gi"}}, "tolerations": [{"operator": "Exists"}]}},
    {"router": {"replicas": 2, "trafficSplit": []}},
    {"router": {"replicas": 2, "tracing": {"endpoint": "http://collector:4318", "samplePercent": 0.5}}},
    {
        "router": {
            "replicas": 2,
            "trafficSplit": [{"deployment": "a", "percent": 40}, {"deployment": "b", "percent": 60}],
        }
    },
    {"router": {"replicas": 1, "trafficSplit": [{"deployment": "a", "percent": 0}]}, "scaling": {"minReplicas": 1}},
    {"storage": {"modelCache": {"pvc": "models"}}},
    {"workers": {"template": {"spec": {"anything": {"goes": [1]}}}, "resources": {"limits": {"cpu": "1"}}}},
    {"model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct@main"}},
    {"replicas": 0},
    {"speculation": {"tree": {"maxNodes": 4, "topK": 2}, "objective": {"itlMilliseconds": 20, "minSpeedup": 1.1}}},
    {"speculation": {"objective": {"ttftMilliseconds": 500, "percentile": 99}}},
    {"speculation": {"tasks": [{"name": "code", "mode": "Off"}, {"name": "sql", "depth": {"min": 2, "max": 8}}]}},
    {"workers": {"recycle": "OnCollapse"}},
    {"speculation": {"method": "ngram", "draft": None}},
    {"speculation": {"method": "suffix", "draft": None}},
    {"speculation": {"method": "peagle", "draft": {"uri": "hf://a/b@main", "quantization": "int4"}}},
    {"speculation": {"method": "dflash", "draft": {"uri": "hf://a/b@main", "quantization": "int8"}}},
    {"speculation": {"draft": {"uri": "hf://a/b@main", "placement": "Own"}}, "engine": {"sampler": "coupled"}},
    {"speculation": {"method": "draft-model", "draft": {"uri": "hf://a/b@main", "placement": "Own"}}},
    {"speculation": {"method": "dflash", "draft": {"uri": "hf://a/b@main", "placement": "Shared"}}},
    {"speculation": {"drafts": [{"name": "a", "method": "peagle", "uri": "file:///m", "quantization": "fp8"}]}},
    {
        "speculation": {
            "drafts": [{"name": "lookup", "method": "suffix"}, {"name": "sql", "method": "medusa", "uri": "file:///m"}],
            "tasks": [{"name": "edits", "draft": "lookup"}, {"name": "chat"}],
        }
    },
    {
        "speculation": {
            "drafts": [{"name": "lookup", "method": "ngram"}, {"name": "sql", "method": "medusa", "uri": "file:///m"}],
            "tasks": [
                {"name": "edits", "merge": [{"draft": "lookup", "depth": 8}, {"draft": "sql"}]},
                {"name": "sql", "draft": "sql", "merge": [{"draft": "lookup", "depth": 0}]},
            ],
        }
    },
    {"workers": {"apiKeysSecretRef": {"name": "keys"}, "maxNumBatchedTokens": 2048}},
    {"workers": {"apiKeysSecretRef": {"name": "team.keys", "key": "all.txt"}}},
    {"workers": {"accelerator": {"resource": "nvidia.com/mig-1g.10gb", "count": 1}}},
    {"workers": {"accelerator": {"count": 4}, "tensorParallelSize": 4}},
    {"workers": {"accelerator": {"count": None}, "tensorParallelSize": 4}},
    {"workers": {"accelerator": {"count": None}, "gpu": False, "tensorParallelSize": 1}},
    {"workers": {"accelerator": {"count": 0}, "tensorParallelSize": 2}},
    {"model": {"quantization": "fp8"}, "workers": {"accelerator": {"count": 1}, "tensorParallelSize": 1}},
    {
        "workers": {
            "accelerator": {"count": 0},
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-h100"}],
            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
            "envFrom": [{"secretRef": {"name": "proxy"}}],
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {"anything": [1]}},
            "topologySpreadConstraints": [{"topologyKey": "zone"}],
            "priorityClassName": "high",
            "serviceAccountName": "reader",
            "runtimeClassName": "nvidia",
        }
    },
    {"workers": {"resources": {"limits": {"cpu": 2, "memory": "16Gi"}, "requests": {"cpu": "500m"}}}},
    {"workers": {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}},
    {"workers": {"rollout": {"maxSurge": "25%"}}},
    {"workers": {"rollout": {"maxUnavailable": 0}}},
    {"workers": {"rollout": {"maxSurge": 0}}},
    {"engine": {"gpuMemoryUtilization": 0.9, "maxWaiting": 8, "enforceEager": True, "sampler": "mss"}},
    {"engine": {"extraArgs": ["--queue-timeout-seconds=5", "--models-are-not-a-flag", "draft"]}},
    {"tls": {"secretName": "llama-tls"}},
    {"rollout": {"draft": {"candidate": {"uri": "pvc://drafts/new", "hash": "4f1c9a7be2d05c6e"}, "mode": "Manual"}}},
    {"rollout": {"draft": {"maxDuration": "1h30m", "maxPairs": 8, "minGainPercent": 0.5, "failureLimit": 1}}},
    {"rollout": {"draft": {}}, "speculation": {"method": "none", "draft": None}},
    {
        "model": {"quantization": "fp8"},
        "speculation": {
            "draft": {"uri": "file:///d", "quantization": "int4"},
            "drafts": [{"name": "other", "method": "draft-model", "uri": "file:///o", "quantization": "int8"}],
        },
    },
]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"speculation": {"draft": None}}, "draft.uri is needed by every method but ngram, suffix and none"),
    ({"speculation": {"method": "none"}}, "draft.uri is needed by every method but ngram, suffix and none"),
    ({"speculation": {"depth": {"min": 4, "initial": 3, "max": 5}}}, "min <= initial <= max"),
    ({"speculation": {"depth": {"initial": 6}}}, "min <= initial <= max"),
    ({"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not exceed maxReplicas"),
    ({"scaling": {"minReplicas": 0}}, "needs router.replicas above 0"),
    ({"scaling": {"minReplicas": 0}, "router": {"replicas": 0}}, "needs router.replicas above 0"),
    ({"scaling": {"idleSeconds": 1}}, "idle_?[sS]econds"),
    ({"router": {"replicas": -1}}, "replicas"),
    ({"router": {"holdSeconds": 0}}, "hold_?[sS]econds"),
    ({"router": {"suspicion": {"minSeconds": 11}}}, "minSeconds <= maxSeconds"),
    ({"router": {"replicas": 2, "tracing": {"endpoint": "collector:4318"}}}, "endpoint"),
    ({"router": {"replicas": 2, "tracing": {"samplePercent": 1}}}, "endpoint"),
    ({"router": {"replicas": 0, "trafficSplit": [{"deployment": "a", "percent": 1}]}}, "needs router.replicas above 0"),
    (
        {"router": {"replicas": 2, "trafficSplit": [{"deployment": name, "percent": 51} for name in "ab"]}},
        "at most 100 percent",
    ),
    (
        {"router": {"replicas": 2, "trafficSplit": [{"deployment": "a", "percent": 1}] * 2}},
        "names every deployment once",
    ),
    ({"router": {"replicas": 2, "trafficSplit": [{"deployment": "A", "percent": 1}]}}, "deployment"),
    ({"router": {"replicas": 2, "trafficSplit": [{"deployment": "a", "percent": 101}]}}, "percent"),
    ({"router": {"replicas": 2, "trafficSplit": [{"deployment": "a"}]}}, "percent"),
    (
        {"router": {"replicas": 2, "trafficSplit": [{"deployment": "a", "percent": 1}]}, "scaling": {"minReplicas": 0}},
        "needs scaling.minReplicas above 0",
    ),
    ({"storage": {"modelCache": {"pvc": "a", "hostPath": "/a"}}}, "not both"),
    *(
        (
            {"speculation": {"method": method, "draft": {"uri": "hf://a/b@main", "placement": "Own"}}},
            "placement Own is for methods eagle3, eagle, draft-model",
        )
        for method in ("peagle", "dflash", "medusa")
    ),
    ({"speculation": {"draft": {"uri": "hf://a/b@main", "placement": "Elsewhere"}}}, "placement"),
    (
        {"speculation": {"draft": {"uri": "hf://a/b@main", "placement": "Own"}}, "engine": {"sampler": "mss"}},
        "placement Own needs engine.sampler coupled",
    ),
    ({"engine": {"extraArgs": ["--draft-placement=own"]}}, "extraArgs must not contain"),
    ({"model": {"uri": "ftp://host/model"}}, "uri"),
    ({"model": {"uri": "hf://no-organisation"}}, "uri"),
    ({"speculation": {"depth": {"max": 99}}}, "max"),
    ({"speculation": {"tasks": [{"name": "Not A Label"}]}}, "name"),
    ({"speculation": {"tasks": [{"name": f"t{i}"} for i in range(8)]}}, "tasks"),
    ({"speculation": {"tasks": [{"name": "a"}, {"name": "a"}]}}, "a name of its own"),
    ({"speculation": {"tasks": [{"name": "a", "depth": {"min": 3, "max": 2}}]}}, "a task's depth must satisfy"),
    ({"speculation": {"tasks": [{"name": "a", "depth": {"initial": 3, "max": 2}}]}}, "a task's depth must satisfy"),
    ({"speculation": {"tasks": [{"name": "a", "mode": "Advisory"}]}}, "mode"),
    ({"speculation": {"tree": {"maxNodes": 2}}}, "must not exceed tree.maxNodes"),
    ({"speculation": {"tree": {"topK": 9}}}, "top"),
    ({"speculation": {"objective": {"minSpeedup": 0.5}}}, "[mM]in_?[sS]peedup"),
    ({"speculation": {"objective": {"itlMilliseconds": 20, "percentile": 42}}}, "percentile"),
    ({"speculation": {"objective": {"percentile": 99}}}, "percentile needs ttftMilliseconds or itlMilliseconds"),
    ({"speculation": {"hysteresis": {"maxChangesPerHour": 0}}}, "[mM]ax_?[cC]hanges"),
    ({"workers": {"recycle": "Always"}}, "recycle"),
    ({"speculation": {"method": "suffix"}}, "draft.uri is needed by every method but ngram, suffix and none"),
    ({"speculation": {"method": "ngram"}}, "draft.uri is needed by every method but ngram, suffix and none"),
    (
        {"speculation": {"method": "peagle", "draft": None}},
        "draft.uri is needed by every method but ngram, suffix and none",
    ),
    ({"speculation": {"drafts": [{"name": "a", "method": "medusa"}]}}, "uri is needed by every method but ngram"),
    (
        {"speculation": {"drafts": [{"name": "a", "method": "ngram"}, {"name": "a", "method": "ngram"}]}},
        "every draft needs a name of its own",
    ),
    ({"speculation": {"tasks": [{"name": "code", "draft": "unknown"}]}}, "must be the name of one of"),
    ({"speculation": merging({"draft": "unknown"})}, "a merged draft must be the name of one of"),
    ({"speculation": merging({"draft": "sql", "depth": 2})}, "merge.depth is for drafts of the methods ngram"),
    ({"speculation": merging({"draft": "lookup", "depth": 17})}, "depth"),
    ({"speculation": merging({"draft": "lookup"}, {"draft": "lookup"})}, "merges a draft once"),
    ({"speculation": merging({"draft": "lookup"}, draft="lookup")}, "cannot merge its own draft"),
    ({"speculation": merging({"draft": "lookup"}) | {"method": "none", "draft": None}}, "needs a draft to merge with"),
    (
        {"speculation": merging({"draft": "lookup"}) | {"draft": {"uri": "hf://org/head", "placement": "Own"}}},
        "merge needs speculation.draft.placement Shared",
    ),
    (
        {"speculation": merging({"draft": "lookup"}), "engine": {"sampler": "mss"}},
        "merge needs engine.sampler coupled",
    ),
    ({"workers": {"maxNumSeqs": 0}}, "[mM]ax_?[nN]um_?[sS]eqs"),
    ({"replicas": -1}, "replicas"),
    ({"model": {"quantization": "int4"}}, "quantization"),
    ({"workers": {"accelerator": {"count": 4}, "tensorParallelSize": 2}}, "must equal workers.accelerator.count"),
    ({"workers": {"accelerator": {"resource": "gpu"}}}, "resource"),
    ({"workers": {"accelerator": {"resource": "node.kubernetes.io/gpu"}}}, "must be an extended resource"),
    ({"workers": {"accelerator": {"resource": "kubernetes.io/gpu"}}}, "must be an extended resource"),
    ({"workers": {"accelerator": {"count": -1}}}, "count"),
    ({"workers": {"resourceClaims": [{"name": "gpu"}]}}, "resource_?[cC]laim"),
    (
        {"workers": {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "b"}] * 2}},
        "Duplicate value",
    ),
    ({"workers": {"env": [{"name": "A"}, {"name": "A"}]}}, "Duplicate value"),
    ({"workers": {"env": [{"name": "POD_NAME", "value": "x"}]}}, "must not set SPECDECODE_CONFIG"),
    ({"workers": {"env": [{"name": "A=B"}]}}, "name"),
    ({"workers": {"affinity": "none"}}, "affinity"),
    ({"workers": {"nodeSelector": {"a": 1}}}, "node_?[sS]elector"),
    ({"workers": {"resources": {"limits": {"cpu": "many"}}}}, "cpu"),
    ({"workers": {"resources": {"limits": {"cpu": 1.5}}}}, "cpu"),
    ({"workers": {"resources": {"limits": "all"}}}, "limits"),
    ({"workers": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}}, "no pod can be replaced"),
    ({"workers": {"rollout": {"maxSurge": "0%", "maxUnavailable": "0%"}}}, "no pod can be replaced"),
    ({"workers": {"rollout": {"maxSurge": "101%"}}}, "[mM]ax_?[sS]urge"),
    ({"workers": {"rollout": {"maxSurge": -1}}}, "[mM]ax_?[sS]urge"),
    ({"workers": {"priorityClassName": "No Name"}}, "[pP]riority_?[cC]lass"),
    ({"engine": {"gpuMemoryUtilization": 1.1}}, "[mM]emory_?[uU]tilization"),
    ({"engine": {"sampler": "greedy"}}, "sampler"),
    ({"engine": {"extraArgs": ["--port", "1"]}}, "has a field of its own"),
    ({"engine": {"extraArgs": ["--max-num-seqs=4"]}}, "has a field of its own"),
    ({"engine": {"extraArgs": ["-tp", "4"]}}, "has a field of its own"),
    ({"engine": {"extraArgs": [""]}}, "[eE]xtra_?[aA]rgs"),
    ({"tls": {}}, "[sS]ecret_?[nN]ame"),
    ({"rollout": {"draft": {"candidate": {"uri": "pvc://drafts/new"}}}}, "hash"),
    ({"rollout": {"draft": {"candidate": {"uri": "pvc://drafts/new", "hash": "not a hash"}}}}, "hash"),
    ({"rollout": {"draft": {"candidate": {"uri": "s3://new", "hash": "4f1c"}}}}, "uri"),
    (
        {"rollout": {"draft": {"candidate": {"uri": "embedded://d", "hash": "4f1c"}}}},
        "must differ from speculation.draft",
    ),
    (
        {
            "rollout": {"draft": {"candidate": {"uri": "pvc://drafts/new", "hash": "4f1c"}}},
            "speculation": {"method": "medusa"},
        },
        "needs speculation.method eagle3",
    ),
    (
        {
            "rollout": {"draft": {"candidate": {"uri": "pvc://drafts/new", "hash": "4f1c"}}},
            "speculation": {"method": "none", "draft": None},
        },
        "needs speculation.method eagle3",
    ),
    ({"rollout": {"draft": {"maxDuration": "1d"}}}, "max_?[dD]uration"),
    ({"rollout": {"draft": {"maxPairs": 7}}}, "max_?[pP]airs"),
    ({"rollout": {"draft": {"blockRequests": 0}}}, "block_?[rR]equests"),
    ({"rollout": {"draft": {"mode": "Blind"}}}, "mode"),
    ({"rollout": {"draft": {"failureLimit": 0}}}, "failure_?[lL]imit"),
    ({"tls": {"secretName": "A"}}, "[sS]ecret_?[nN]ame"),
    (
        {"speculation": {"method": "medusa", "draft": {"uri": "file:///m", "quantization": "int4"}}},
        "quantization is for drafts of methods",
    ),
    (
        {"speculation": {"drafts": [{"name": "a", "method": "suffix", "quantization": "int4"}]}},
        "quantization is for drafts of methods",
    ),
]


TYPOS: list[dict[str, Any]] = [{"speculaton": {}}, {"speculation": {"dept": {"max": 2}}}, {"workers": {"gpus": 1}}]


NAMES = {
    "a": True,
    "llama-3-1-8b": True,
    "n" * 45: True,
    "n" * 46: False,
    "llama-3.1": False,
    "3-llama": False,
    "llama-": False,
}


def spec_with(change: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(without_none(deep(SPEC, change))))  # type: ignore[no-any-return]


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return value
