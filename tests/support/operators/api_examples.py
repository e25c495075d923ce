"""Specs that are valid, invalid or misspelled: examples for the models and for the API server's rules."""

from __future__ import annotations

import copy
from typing import Any

from support.operators.fleet import SPEC


def merging(*merge: dict[str, Any], **task: Any) -> dict[str, Any]:
    """Return a speculation whose task merges drafts."""
    drafts = [{"name": "lookup", "method": "ngram"}, {"name": "sql", "uri": "file:///m"}]
    return {"drafts": drafts, "tasks": [{"name": "edits", "merge": list(merge), **task}]}


def split(*percents: int, replicas: int = 2) -> dict[str, Any]:
    """Return routers that send these shares of the traffic to the deployments a and b."""
    shares = [{"deployment": name, "percent": percent} for name, percent in zip("ab", percents, strict=False)]
    return {"replicas": replicas, "trafficSplit": shares}


NEEDS_URI = "draft.uri is needed by every method but ngram, suffix and none"
OWN = {"uri": "hf://a/b@main", "placement": "Own"}
"""A draft on a device of its own."""
S3: dict[str, Any] = {"uri": "s3://models", "secretRef": {"name": "key"}}

GOOD: list[dict[str, Any]] = [
    {},
    {"speculation": {"method": "none", "draft": None}},
    {"speculation": {"depth": {"min": 2, "initial": 2, "max": 2}}},
    {"speculation": {"depth": {"min": 0, "max": 2}}},
    {"speculation": {"tree": {"maxNodes": 2}}},
    {"scaling": {"minReplicas": 2, "maxReplicas": 2}},
    {"scaling": {"minReplicas": 0, "idleAfter": "60s"}, "router": {"replicas": 2}},
    {"scaling": {"minReplicas": 0, "owner": "External"}},
    {"router": {"replicas": 1, "autoscaled": True, "holdTimeout": "1h30m"}},
    {"router": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}},
    {"router": split()},
    {"router": split(40, 60)},
    {"router": split(0, replicas=1), "scaling": {"minReplicas": 1}},
    {"modelCache": {"persistentVolumeClaim": {"claimName": "models"}}},
    {"modelCache": {"hostPath": {"path": "/models"}}, "prefetchNodeSelector": {"models": "llama"}},
    {"workers": {"template": {"spec": {"anything": {"goes": [1]}}}, "resources": {"limits": {"cpu": "1"}}}},
    {"model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct@main"}},
    {"replicas": 0},
    {"speculation": {"tree": {"maxNodes": 4, "topK": 2}, "objective": {"itl": "22.5ms", "minGainPercent": 10}}},
    {"speculation": {"objective": {"ttft": "2s", "percentile": 99}, "stability": "High"}},
    {"speculation": {"tasks": [{"name": "code", "mode": "Off"}, {"name": "sql", "depth": {"min": 2, "max": 8}}]}},
    {"workers": {"recycle": "OnCollapse"}},
    {"speculation": {"method": "ngram", "draft": None}},
    {"speculation": {"method": "suffix", "draft": None}},
    {"speculation": {"method": "peagle", "draft": {"uri": "hf://a/b@main", "quantization": "int4"}}},
    {"speculation": {"method": "dflash", "draft": {"uri": "hf://a/b@main", "quantization": "int8"}}},
    {"speculation": {"draft": OWN}, "engine": {"sampler": "coupled"}},
    {"speculation": {"draft": OWN}, "prefill": {"replicas": 0}},
    {"prefill": {"replicas": 0, "maxReplicas": 2}},
    {"speculation": {"method": "draft-model", "draft": OWN}},
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
    {"apiKeysSecretRef": {"name": "keys"}, "imagePullSecrets": [{"name": "registry"}, {"name": "other"}]},
    {"apiKeysSecretRef": {"name": "team.keys", "key": "all.txt"}, "paused": True},
    {"speculation": {"pin": "none", "tasks": [{"name": "code", "pin": "chain:6"}, {"name": "sql", "pin": "tree:4,2"}]}},
    {"speculation": {"pin": "0,0,1,2"}},
    {"workers": {"accelerator": {"resource": "nvidia.com/mig-1g.10gb", "count": 1}}},
    {"workers": {"accelerator": {"count": 4}}, "engine": {"tensorParallelSize": 4}},
    {"workers": {"accelerator": {"count": None}}, "engine": {"tensorParallelSize": 4}},
    {"workers": {"accelerator": {"count": 0}}, "engine": {"tensorParallelSize": 2}},
    {"engine": {"quantization": "fp8", "tensorParallelSize": 1}, "workers": {"accelerator": {"count": 1}}},
    {"workers": {"resources": {"limits": {"cpu": 2, "memory": "16Gi"}, "requests": {"cpu": "500m"}}}},
    {"workers": {"strategy": {"maxSurge": 1, "maxUnavailable": 0}}},
    {"workers": {"strategy": {"maxSurge": "25%"}}},
    {"workers": {"strategy": {"maxUnavailable": 0}}},
    {"workers": {"strategy": {"maxSurge": 0}}},
    {"engine": {"memoryPercent": 90, "sampler": "mss", "maxNumBatchedTokens": 2048}},
    {"engine": {"extraArgs": ["--queue-timeout-seconds=5", "--models-are-not-a-flag", "draft"]}},
    {"engine": {"extraArgs": ["--enforce-eager"]}},
    {"tlsSecretRef": {"name": "llama-tls"}},
    {"draftRollout": {"mode": "Manual", "maxDuration": "1h30m", "minGainPercent": 1}},
    {"distillation": {"trigger": {"reject": "6928f3a1"}}},
    {"draftRollout": {}, "speculation": {"method": "none", "draft": None}},
    {
        "distillation": {
            "capture": {"percent": 100, "percentByTask": {"code": 0}, "maxAge": "2h"},
            "trigger": {"mode": "Drift", "baseline": "5m", "request": "now"},
            "storage": {"uri": "pvc://drafts"},
        }
    },
    {"distillation": {"capture": {}, "trigger": {"mode": "Drift"}, "storage": S3}},
    {"distillation": {"storage": {**S3, "uri": "s3://models/team/a", "endpoint": "http://s3:9000", "region": "eu-1"}}},
    {"distillation": {"jobTemplate": {"spec": {"nodeSelector": {"pool": "training"}}}, "timeLimit": "90m"}},
    {
        "engine": {"quantization": "fp8"},
        "speculation": {
            "draft": {"uri": "file:///d", "quantization": "int4"},
            "drafts": [{"name": "other", "method": "draft-model", "uri": "file:///o", "quantization": "int8"}],
        },
    },
]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"speculation": {"draft": None}}, NEEDS_URI),
    ({"speculation": {"method": "none"}}, NEEDS_URI),
    ({"speculation": {"method": "medusa2"}}, "Unsupported value"),
    ({"speculation": {"depth": {"min": 4, "initial": 3, "max": 5}}}, "min <= initial <= max"),
    ({"speculation": {"depth": {"initial": 6}}}, "min <= initial <= max"),
    ({"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not exceed maxReplicas"),
    ({"scaling": {"minReplicas": 0}}, "needs router.replicas above 0"),
    ({"scaling": {"minReplicas": 0}, "router": {"replicas": 0}}, "needs router.replicas above 0"),
    ({"scaling": {"minReplicas": 0, "idleAfter": "1s"}}, "write a duration from 10s to 168h"),
    ({"scaling": {"scaleDownWindow": "25h"}}, "write a duration from 0s to 24h"),
    ({"drain": {"gracePeriod": "60"}}, "gracePeriod"),
    ({"drain": {"gracePeriod": "0s"}}, "write a duration from 1s to 2h"),
    ({"drain": {"endpointDelay": "6m"}}, "write a duration from 0s to 5m"),
    ({"router": {"replicas": -1}}, "replicas"),
    ({"router": {"holdTimeout": "0s"}}, "write a duration from 1s to 24h"),
    ({"router": split(1, replicas=0)}, "needs router.replicas above 0"),
    ({"router": split(51, 51)}, "at most 100 percent"),
    ({"router": {"replicas": 2, "trafficSplit": [{"deployment": "a", "percent": 1}] * 2}}, "Duplicate value"),
    ({"router": {"replicas": 2, "trafficSplit": [{"deployment": "A", "percent": 1}]}}, "deployment"),
    ({"router": split(101)}, "percent"),
    ({"router": {"replicas": 2, "trafficSplit": [{"deployment": "a"}]}}, "percent"),
    ({"router": split(1), "scaling": {"minReplicas": 0}}, "needs scaling.minReplicas above 0"),
    *(
        (
            {"speculation": {"method": method, "draft": OWN}},
            "placement Own is for methods eagle3, eagle, draft-model",
        )
        for method in ("peagle", "dflash", "medusa")
    ),
    ({"speculation": {"draft": {"uri": "hf://a/b@main", "placement": "Elsewhere"}}}, "placement"),
    (
        {"speculation": {"draft": OWN}, "prefill": {"replicas": 1}},
        "placement Own keeps the draft's keys in another process",
    ),
    ({"prefill": {"replicas": 3, "maxReplicas": 2}}, "prefill.replicas must not exceed"),
    ({"speculation": {"draft": OWN}, "engine": {"sampler": "mss"}}, "placement Own needs engine.sampler coupled"),
    ({"engine": {"extraArgs": ["--draft-placement=own"]}}, "extraArgs must not contain"),
    ({"model": {"uri": "ftp://host/model"}}, "uri"),
    ({"model": {"uri": "hf://no-organisation"}}, "uri"),
    ({"speculation": {"depth": {"max": 99}}}, "max"),
    ({"speculation": {"tasks": [{"name": "Not A Label"}]}}, "name"),
    ({"speculation": {"tasks": [{"name": f"t{i}"} for i in range(8)]}}, "tasks"),
    ({"speculation": {"tasks": [{"name": "a"}, {"name": "a"}]}}, "Duplicate value"),
    ({"speculation": {"tasks": [{"name": "a", "depth": {"min": 3, "max": 2}}]}}, "a task's depth must satisfy"),
    ({"speculation": {"tasks": [{"name": "a", "depth": {"initial": 3, "max": 2}}]}}, "a task's depth must satisfy"),
    ({"speculation": {"tasks": [{"name": "a", "mode": "Advisory"}]}}, "mode"),
    ({"speculation": {"depth": {"min": 6}}}, "min <= initial <= max"),
    ({"speculation": {"depth": {"initial": 3}, "tree": {"maxNodes": 2}}}, "must not exceed tree.maxNodes"),
    ({"speculation": {"depth": {"min": 3}, "tree": {"maxNodes": 2}}}, "must not exceed tree.maxNodes"),
    ({"speculation": {"tree": {"topK": 9}}}, "top"),
    ({"speculation": {"objective": {"minGainPercent": -1}}}, "minGainPercent"),
    ({"speculation": {"objective": {"itl": "20ms", "percentile": 42}}}, "percentile"),
    ({"speculation": {"objective": {"percentile": 99}}}, "percentile needs ttft or itl"),
    ({"speculation": {"objective": {"itl": "0.5ms"}}}, "write a duration from 1ms to 10m"),
    ({"speculation": {"objective": {"itl": "20"}}}, "itl"),
    ({"speculation": {"stability": "Highest"}}, "stability"),
    ({"speculation": {"pin": "chain"}}, "pin"),
    ({"speculation": {"tasks": [{"name": "code", "pin": "fork:2"}]}}, "pin"),
    ({"workers": {"recycle": "Always"}}, "recycle"),
    ({"speculation": {"method": "suffix"}}, NEEDS_URI),
    ({"speculation": {"method": "ngram"}}, NEEDS_URI),
    ({"speculation": {"method": "peagle", "draft": None}}, NEEDS_URI),
    ({"speculation": {"drafts": [{"name": "a", "method": "medusa"}]}}, "uri is needed by every method but ngram"),
    (
        {"speculation": {"drafts": [{"name": "a", "method": "ngram"}, {"name": "a", "method": "ngram"}]}},
        "Duplicate value",
    ),
    ({"speculation": {"tasks": [{"name": "code", "draft": "unknown"}]}}, "must be the name of one of"),
    ({"speculation": merging({"draft": "unknown"})}, "a merged draft must be the name of one of"),
    ({"speculation": merging({"draft": "sql", "depth": 2})}, "merge.depth is for drafts of methods ngram"),
    ({"speculation": merging({"draft": "lookup", "depth": 17})}, "depth"),
    ({"speculation": merging({"draft": "lookup"}, {"draft": "lookup"})}, "Duplicate value"),
    ({"speculation": merging({"draft": "lookup"}, draft="lookup")}, "cannot merge its own draft"),
    ({"speculation": merging({"draft": "lookup"}) | {"method": "none", "draft": None}}, "needs a draft to merge with"),
    (
        {"speculation": merging({"draft": "lookup"}) | {"draft": {"uri": "hf://org/head", "placement": "Own"}}},
        "merge needs speculation.draft.placement Shared",
    ),
    ({"speculation": merging({"draft": "lookup"}), "engine": {"sampler": "mss"}}, "merge needs engine.sampler coupled"),
    ({"engine": {"maxNumSeqs": 0}}, "maxNumSeqs"),
    ({"replicas": -1}, "replicas"),
    ({"engine": {"quantization": "int4"}}, "quantization"),
    (
        {"workers": {"accelerator": {"count": 4}}, "engine": {"tensorParallelSize": 2}},
        "must equal workers.accelerator.count",
    ),
    ({"workers": {"accelerator": {"resource": "gpu"}}}, "resource"),
    ({"workers": {"accelerator": {"resource": "node.kubernetes.io/gpu"}}}, "must be an extended resource"),
    ({"workers": {"accelerator": {"resource": "kubernetes.io/gpu"}}}, "must be an extended resource"),
    ({"workers": {"accelerator": {"count": -1}}}, "count"),
    ({"workers": {"resources": {"limits": {"cpu": "many"}}}}, "cpu"),
    ({"workers": {"resources": {"limits": {"cpu": 1.5}}}}, "cpu"),
    ({"workers": {"resources": {"limits": "all"}}}, "limits"),
    ({"workers": {"strategy": {"maxSurge": 0, "maxUnavailable": 0}}}, "no pod can be replaced"),
    ({"workers": {"strategy": {"maxSurge": "0%", "maxUnavailable": "0%"}}}, "no pod can be replaced"),
    ({"workers": {"strategy": {"maxSurge": "101%"}}}, "[mM]ax_?[sS]urge"),
    ({"workers": {"strategy": {"maxSurge": -1}}}, "[mM]ax_?[sS]urge"),
    ({"imagePullSecrets": [{"name": "a"}, {"name": "a"}]}, "Duplicate value"),
    ({"imagePullSecrets": [{"name": "No Name"}]}, "imagePullSecrets"),
    ({"engine": {"memoryPercent": 101}}, "memoryPercent"),
    ({"engine": {"sampler": "greedy"}}, "sampler"),
    ({"engine": {"extraArgs": ["--port", "1"]}}, "has a field of its own"),
    ({"engine": {"extraArgs": ["--max-num-seqs=4"]}}, "has a field of its own"),
    ({"engine": {"extraArgs": ["-tp", "4"]}}, "has a field of its own"),
    ({"engine": {"extraArgs": [""]}}, "[eE]xtra_?[aA]rgs"),
    ({"tlsSecretRef": {}}, "tlsSecretRef"),
    ({"draftRollout": {"maxDuration": "1d"}}, "max_?[dD]uration"),
    ({"draftRollout": {"blockRequests": 0}}, "block_?[rR]equests"),
    ({"draftRollout": {"mode": "Blind"}}, "mode"),
    ({"tlsSecretRef": {"name": "A"}}, "tlsSecretRef"),
    (
        {"speculation": {"method": "medusa", "draft": {"uri": "file:///m", "quantization": "int4"}}},
        "quantization is for drafts of methods",
    ),
    (
        {"speculation": {"drafts": [{"name": "a", "method": "suffix", "quantization": "int4"}]}},
        "quantization is for drafts of methods",
    ),
    ({"draftRollout": {"minGainPercent": 0.5}}, "minGainPercent"),
    ({"distillation": {"capture": {"percent": 101}}}, "percent"),
    ({"distillation": {"capture": {}}, "speculation": {"method": "medusa"}}, "capture needs speculation.method eagle3"),
    ({"distillation": {"trigger": {"mode": "Drift"}, "storage": S3}}, "needs distillation.capture"),
    ({"distillation": {"trigger": {"mode": "Drift"}, "capture": {}}}, "needs distillation.storage"),
    ({"distillation": {"trigger": {"baseline": "4m"}}}, "baseline is at least 5m"),
    ({"distillation": {"timeLimit": "1d"}}, "timeLimit"),
    ({"distillation": {"storage": {"uri": "s3://models"}}}, "secretRef is needed with an s3"),
    ({"distillation": {"storage": {**S3, "uri": "pvc://drafts"}}}, "secretRef is needed with an s3"),
    (
        {"distillation": {"storage": {"uri": "pvc://drafts", "endpoint": "http://s3"}}},
        "all but the uri is only for one",
    ),
    *(
        ({"distillation": {"storage": {**S3, "uri": uri}}}, "uri")
        for uri in ("s3://Models", "s3://models/", "s3://models//a", "s3://models/a/../b", "pvc://a/b", "s3:///a")
    ),
    ({"distillation": {"storage": {**S3, "endpoint": "s3.example.com"}}}, "endpoint"),
    ({"distillation": {"storage": {**S3, "endpoint": "https://s3.example.com/path"}}}, "endpoint"),
    ({"distillation": {"storage": {**S3, "secretRef": {"name": "A b"}}}}, "secretRef"),
    ({"distillation": {"trigger": {"reject": ""}}}, "reject"),
    ({"model": {"uri": "hf://org/m", "chatTemplate": "template.jinja"}}, "chatTemplate"),
]
"""Specs that the API server refuses, with words of its answer."""


TYPOS: list[dict[str, Any]] = [{"speculaton": {}}, {"speculation": {"dept": {"max": 2}}}, {"workers": {"gpus": 1}}]
RESERVED: list[dict[str, Any]] = [{"engine": {"kind": "other"}}]
"""Fields to come, whose names no other field may take (docs/reference/api-versions.md)."""


NAMES = {
    "a": True,
    "llama-3-1-8b": True,
    "n" * 45: True,
    "n" * 46: False,
    "llama-3.1": False,
    "3-llama": False,
    "llama-": False,
}


def merged(spec: Any, change: Any) -> Any:
    """Return the spec with a change merged into its objects. None removes a field."""
    if not isinstance(spec, dict) or not isinstance(change, dict):
        return copy.deepcopy(change)
    unchanged = {key: value for key, value in spec.items() if key not in change}
    changed = {key: merged(spec.get(key, {}), value) for key, value in change.items() if value is not None}
    return {**unchanged, **changed}


def spec_with(change: dict[str, Any]) -> dict[str, Any]:
    return merged(SPEC, change)  # type: ignore[no-any-return]
