"""Hypothesis strategies of specs, made from the structural schema of the CRD: mostly valid, and broken on purpose."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from specdecode_worker.contract import DRAFT_FREE
from support.operators.api_examples import BAD, merged

Json = Any
Schema = Mapping[str, Any]

WORDS = ("spec", "metadata", "labels", "containers", "initContainers", "volumes", "env", "ports", "name", "resources",
         "limits", "securityContext", "volumeMounts", "mountPath", "containerPort", "image", "topologyKey",
         "nodeAffinity", "worker", "pull")  # fmt: skip
"""Keys and texts of pod templates, so that merges reach the lists and objects of the operator's template."""
NUMBERS = st.integers(-(2**31), 2**31) | st.floats(-1e9, 1e9)
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(WORDS) | st.text(max_size=8)
ANYTHING: st.SearchStrategy[Json] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
ITEMS = st.lists(SCALARS | ANYTHING | st.fixed_dictionaries({"name": ANYTHING}), max_size=3) | ANYTHING
"""Lists that may have items of wrong types, or identifying fields that cannot identify anything."""
ODD_IDENTITIES = (None, True, 1.5, [], ["a"], {}, {"a": 1})
"""Values by which an item cannot be identified: they have no hash, or Kubernetes has no such name or port."""
IDENTITIES: Mapping[str, tuple[str, Json]] = {
    "containers": ("name", "worker"),
    "initContainers": ("name", "pull"),
    "env": ("name", "HOME"),
    "volumes": ("name", "tmp"),
    "volumeMounts": ("mountPath", "/tmp"),
    "ports": ("containerPort", 8000),
    "imagePullSecrets": ("name", "a"),
    "topologySpreadConstraints": ("topologyKey", "zone"),
}
"""Lists of a pod template: the field that identifies the items of each, and a value that the operator uses there."""


def odd_list(name: str) -> st.SearchStrategy[Json]:
    """Return a strategy of lists that are right but for one item, or that are no lists."""
    key, identity = IDENTITIES[name]
    right = st.sampled_from((identity, "other" if isinstance(identity, str) else 9000)).map(lambda value: {key: value})
    odd = st.sampled_from(({}, {"value": "x"}, *({key: value} for value in ODD_IDENTITIES), 3, "x", None, [], True))
    lists = st.builds(lambda before, item: [*before, item], st.lists(right, max_size=1), odd)
    return st.one_of(lists, lists, lists, st.sampled_from(("x", 3, {}, True, {"name": "worker"})))


CONTAINER = st.fixed_dictionaries(
    {"name": st.sampled_from(("worker", "pull", "sidecar"))},
    optional={
        "env": st.lists(st.fixed_dictionaries({"name": st.sampled_from(WORDS)}), max_size=2) | ITEMS,
        "ports": st.lists(st.fixed_dictionaries({"containerPort": st.integers(1, 9000)}), max_size=2) | ITEMS,
        "volumeMounts": ITEMS,
        "resources": ANYTHING,
        "image": st.sampled_from(WORDS) | ANYTHING,
    },
)
ODD_CONTAINER = st.sampled_from(("env", "ports", "volumeMounts")).flatmap(
    lambda name: st.builds(lambda container, items: {**container, name: items}, CONTAINER, odd_list(name))
)
ODD_POD = st.sampled_from(("containers", "initContainers", "volumes", "imagePullSecrets", "topologySpreadConstraints"))
ODD_TEMPLATE = st.one_of(
    ODD_POD.flatmap(lambda name: st.builds(lambda items: {"spec": {name: items}}, odd_list(name))),
    st.builds(lambda container: {"spec": {"containers": [container]}}, ODD_CONTAINER),
)
"""Pod templates with one list that has an odd item: the places where a merge goes wrong."""
TEMPLATE = ODD_TEMPLATE | st.fixed_dictionaries(
    {},
    optional={
        "metadata": ANYTHING,
        "spec": ANYTHING
        | st.fixed_dictionaries(
            {},
            optional={
                "containers": st.lists(CONTAINER | ODD_CONTAINER, max_size=3) | ITEMS,
                "volumes": ITEMS,
                "topologySpreadConstraints": ITEMS,
                "securityContext": ANYTHING,
            },
        ),
    },
)
"""Pod templates that are merged over the operator's."""


def from_schema(node: Schema, path: str = "") -> st.SearchStrategy[Json]:
    """Return a strategy of values that a structural schema admits, but for its CEL rules."""
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        texts = st.from_regex(node["pattern"], fullmatch=True).filter(lambda text: len(text) <= 64)
        return st.integers(node.get("minimum", -5), node.get("maximum", 10**6)) | texts
    return _KINDS[node["type"]](node, path)


def _objects(node: Schema, path: str) -> st.SearchStrategy[Json]:
    if path in (".workers.template", ".router.template", ".distillation.jobTemplate"):
        return TEMPLATE
    if "additionalProperties" in node:
        keys = st.sampled_from(("cpu", "memory", "nvidia.com/gpu", "a")) | st.text(max_size=8)
        return st.dictionaries(keys, from_schema(node["additionalProperties"], path), max_size=3)
    if "properties" not in node:
        return st.dictionaries(st.sampled_from(WORDS), ANYTHING, max_size=3)
    fields = {name: from_schema(field, f"{path}.{name}") for name, field in node["properties"].items()}
    required = {name: fields[name] for name in node.get("required", ())}
    optional = {name: fields[name] for name in fields if name not in required}
    most = 8 if path in ("", ".workers", ".speculation") else 3
    chosen = st.sets(st.sampled_from(sorted(optional)), max_size=most) if optional else st.just(set[str]())
    if path == "":
        chosen = chosen.map(lambda names: names | {"workers"})
    if path == ".workers":
        chosen = chosen.flatmap(lambda names: st.sampled_from((names, names | {"template"})))
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: fields[name] for name in sorted(names)}})
    )


def _lists(node: Schema, path: str) -> st.SearchStrategy[Json]:
    keys = node.get("x-kubernetes-list-map-keys")
    unique: Callable[[Json], Json] | None = (lambda item: item[keys[0]]) if keys else None
    return st.lists(from_schema(node["items"], f"{path}[]"), max_size=min(3, node.get("maxItems", 3)), unique_by=unique)


def _strings(node: Schema, path: str) -> st.SearchStrategy[Json]:
    most, least = node.get("maxLength", 40), node.get("minLength", 0)
    if "pattern" in node:
        return st.from_regex(node["pattern"], fullmatch=True).filter(lambda text: least <= len(text) <= most)
    return st.text(min_size=least, max_size=min(most, 20))


_KINDS: Mapping[str, Callable[[Schema, str], st.SearchStrategy[Json]]] = {
    "object": _objects,
    "array": _lists,
    "number": lambda node, path: st.floats(node["minimum"], node["maximum"]),
    "integer": lambda node, path: st.integers(node["minimum"], node.get("maximum", 2**53)),
    "string": _strings,
    "boolean": lambda node, path: st.booleans(),
}


@st.composite
def specs(draw: st.DrawFn, schema: Schema) -> Json:
    """Draw a spec. Most keep the rules across fields; the others break one rule, or are broken at random places."""
    spec = draw(from_schema(schema))
    kind = draw(st.sampled_from(("repaired", "repaired", "repaired", "repaired", "one rule", "as drawn", "broken")))
    if kind == "repaired":
        return repaired(spec)
    if kind == "one rule":
        return merged(repaired(spec), draw(st.sampled_from(RULE_BREAKS)))
    return broken(draw, spec) if kind == "broken" else spec


RULED_FIELDS = (
    "engine.tensorParallelSize",
    "workers.accelerator.resource",
    "scaling.idleAfter",
    "scaling.scaleDownWindow",
    "drain.endpointDelay",
    "drain.gracePeriod",
    "router.holdTimeout",
    "speculation.objective.percentile",
    "speculation.objective.ttft",
    "speculation.objective.itl",
    "distillation.trigger.mode",
    "distillation.trigger.baseline",
)
"""Optional fields with rules that a pattern or a bound cannot hold."""
RULE_BREAKS = tuple(change for change, _ in BAD)
"""Changes of a spec that break one rule each. None removes a field."""


def repaired(spec: Json) -> Json:
    """Return the spec with the rules across fields kept, so that most of it is admitted."""
    spec = copy.deepcopy(spec)
    for path in RULED_FIELDS:
        *holders, name = path.split(".")
        functools.reduce(lambda node, key: node.get(key, {}), holders, spec).pop(name, None)
    if "speculation" in spec:
        _repair_speculation(spec["speculation"])
        if spec["speculation"].get("draft", {}).get("placement") == "Own":
            spec.get("engine", {}).pop("sampler", None)
    strategy = spec.get("workers", {}).get("strategy", {})
    if strategy.get("maxUnavailable") in (0, "0%"):
        strategy.pop("maxSurge", None)
    storage = spec.get("distillation", {}).get("storage")
    if storage is not None and storage["uri"].startswith("s3://"):
        storage["secretRef"] = {"name": "key"}
    elif storage is not None:
        spec["distillation"]["storage"] = {"uri": storage["uri"]}
    scaling = spec.get("scaling", {})
    if scaling.get("minReplicas", 1) > scaling.get("maxReplicas", 4):
        scaling.pop("minReplicas", None)
        scaling["maxReplicas"] = 1000
    return spec


def _repair_speculation(speculation: Json) -> None:
    """Make the drafts, tasks and depths of ``speculation`` agree, in place."""
    _repair_draft(speculation)
    drafts = {draft["name"]: draft for draft in speculation.get("drafts", ())}
    for draft in drafts.values():
        draft.pop("quantization", None)
        draft.pop("uri", None)
        if draft.get("method") not in DRAFT_FREE:
            draft["uri"] = "file:///draft"
    tasks = {task["name"]: task for task in speculation.get("tasks", ())}
    for task in tasks.values():
        task.pop("draft", None)
        _order(task.get("depth", {}))
        if drafts:
            task["draft"] = next(iter(drafts))
    for name, items in (("drafts", drafts), ("tasks", tasks)):
        if name in speculation:
            speculation[name] = list(items.values())
    depth = speculation.get("depth", {})
    if depth:
        depth |= {"min": depth.get("min", 0), "max": depth.get("max", 5)}
        _order(depth)
    if speculation.get("tree", {}).get("maxNodes", 63) < depth.get("initial", depth.get("min", 0)):
        speculation["tree"]["maxNodes"] = 63


def _repair_draft(speculation: Json) -> None:
    if speculation.get("method", "eagle3") in DRAFT_FREE:
        speculation.pop("draft", None)
        return
    speculation.setdefault("draft", {"uri": "embedded://draft"})
    if speculation.get("method") == "medusa":
        speculation["draft"].pop("quantization", None)
    if speculation.get("method") in ("peagle", "dflash", "medusa"):
        speculation["draft"].pop("placement", None)


def _order(depth: Json) -> None:
    names = [name for name in ("min", "initial", "max") if name in depth]
    for name, value in zip(names, sorted(depth[name] for name in names), strict=True):
        depth[name] = value


def broken(draw: st.DrawFn, spec: Json) -> Json:
    """Return the spec with a random value at a random place."""
    spec = copy.deepcopy(spec)
    node: Json = spec
    while isinstance(node, dict | list) and node:
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or draw(st.booleans()):
            node[key] = draw(ANYTHING)
            return spec
        node = node[key]
    return spec
