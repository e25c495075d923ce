"""Generation of the CRDs from the models: ``python -m specdecode_operator.api.crd [--check]``.

It writes crds/<plural>.<group>.yaml, and the same text as a template of the chart. ``--check`` compares instead and
exits with 1. A structural schema allows less than JSON Schema: references are inlined, titles are dropped, and optional
fields may be absent but not null. Defaults and examples are appended to descriptions: ``kubectl explain`` has no more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from specdecode_operator.api.draft import (
    DRAFT_COLUMNS,
    DRAFT_KIND,
    DRAFT_PLURAL,
    DRAFT_SHORT_NAME,
    DraftResourceSpec,
    DraftResourceStatus,
)
from specdecode_operator.api.schema import SELF_SPLIT_MESSAGE, SELF_SPLIT_RULE, rule
from specdecode_operator.api.v1alpha1 import (
    COLUMNS,
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    NAME_MESSAGE,
    NAME_PATTERN,
    PLURAL,
    VERSION,
    Spec,
    Status,
)

_DROPPED = {"title", "$defs", "examples"}
_CHART_HEAD = "{{- if .Values.crds.enabled }}\n"
_CHART_TAIL = "{{- end }}\n"


def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of SpecDecodeDeployments as a manifest."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return _definition(KIND, PLURAL, "sdd", {"status": {}, "scale": scale}, COLUMNS, root_schema())


def draft_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of SpecDecodeDrafts as a manifest."""
    return _definition(DRAFT_KIND, DRAFT_PLURAL, DRAFT_SHORT_NAME, {"status": {}}, DRAFT_COLUMNS, draft_schema())


def _definition(
    kind: str,
    plural: str,
    short_name: str,
    subresources: dict[str, Any],
    columns: Sequence[dict[str, Any]],
    schema: dict[str, Any],
) -> dict[str, Any]:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": subresources,
        "additionalPrinterColumns": list(columns),
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # `helm uninstall` leaves it: removing a CRD removes every object of its kind.
        "metadata": {"name": f"{plural}.{GROUP}", "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["specdecode"],
            },
            "versions": [version],
        },
    }


def text(manifest: Mapping[str, Any]) -> str:
    """Return a CRD as YAML, equal from run to run."""
    head = "# Made by `make crds` from operator/specdecode_operator/api; do not edit.\n"
    return head + yaml.dump(manifest, Dumper=_PlainDumper, sort_keys=False, width=120)


def structural(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pydantic JSON schema to a structural schema of Kubernetes."""
    return _convert(schema, schema.get("$defs", {}))


def root_schema() -> dict[str, Any]:
    """Return the structural schema of a SpecDecodeDeployment."""
    name = f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')"
    description = "Model that is served with speculative decoding tuned from measurements."
    validations = [rule(name, NAME_MESSAGE), rule(SELF_SPLIT_RULE, SELF_SPLIT_MESSAGE)]
    return {**_schema(KIND, description, Spec, Status), "x-kubernetes-validations": validations}


def draft_schema() -> dict[str, Any]:
    """Return the structural schema of a SpecDecodeDraft."""
    description = "Draft of a SpecDecodeDeployment: what should become of it, and what became of it."
    return _schema(DRAFT_KIND, description, DraftResourceSpec, DraftResourceStatus)


def _schema(kind: str, description: str, spec: type[BaseModel], status: type[BaseModel]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{kind}."},
            "metadata": {"type": "object"},
            "spec": structural(spec.model_json_schema(by_alias=True)),
            # The API server must not fill status in: a default there would look like an observation.
            "status": structural(_without_defaults(status.model_json_schema(by_alias=True))),
        },
    }


def _without_defaults(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_defaults(value) for key, value in node.items() if key != "default"}
    return [_without_defaults(item) for item in node] if isinstance(node, list) else node


def _convert(node: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    node = _resolve(node, defs)
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in _DROPPED or (key == "default" and value is None):
            continue
        if key == "properties":
            out[key] = {name: _convert(child, defs) for name, child in value.items()}
        elif key in ("items", "additionalProperties"):
            if isinstance(value, Mapping):
                out[key] = _convert(value, defs)
        elif key == "const":
            out["enum"] = [value]
        elif key == "default" and "properties" in node:
            out[key] = {}  # the API server fills the fields in from their own defaults
        else:
            out[key] = value
    if "description" in out:
        out["description"] = _description(node)
    return out


def _description(node: Mapping[str, Any]) -> str:
    """Return the description with the default, where it is one value, and the first example."""
    words = [" ".join(node["description"].split())]
    default = node.get("default")
    if default is not None and not isinstance(default, dict | list):
        words.append(f"Default: {_value(default)}.")
    if node.get("examples"):
        words.append(f"Example: {_value(node['examples'][0])}")
    return " ".join(words)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _resolve(node: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    """Follow $ref and drop the null of Optional. Keys next to a reference replace those that it refers to."""
    resolved = dict(node)
    while "$ref" in resolved or "anyOf" in resolved:
        if "$ref" in resolved:
            inner = defs[resolved.pop("$ref").rsplit("/", 1)[-1]]
        else:
            (inner,) = [option for option in resolved.pop("anyOf") if option.get("type") != "null"]
        resolved = {**inner, **resolved}
    return resolved


class _PlainDumper(yaml.SafeDumper):
    """YAML without anchors: shared lists would become &id001."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _targets(root: Path) -> dict[Path, str]:
    """Return the text of every generated file, by path."""
    made = {f"{one['metadata']['name']}.yaml": text(one) for one in (crd(), draft_crd())}
    return {
        **{root / "crds" / name: one for name, one in made.items()},
        root / "helm" / "specdecode" / "templates" / "crd.yaml": _CHART_HEAD
        + "---\n".join(made.values())
        + _CHART_TAIL,
    }


def main() -> int:
    """Write or compare the generated files and return the exit code."""
    parser = argparse.ArgumentParser(description="generate crds/*.yaml and the chart's copy from the models")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: the working directory)")
    args = parser.parse_args()
    stale = [path for path, made in _targets(args.root).items() if not path.exists() or path.read_text() != made]
    if args.check:
        for path in stale:
            print(f"{path} does not match the models; run `make crds`", file=sys.stderr)
        return 1 if stale else 0
    for path, made in _targets(args.root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
