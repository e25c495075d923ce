"""Generator of the CRD and of docs/reference/resource.md: ``python -m specdecode_operator.api.crd [--check]``.

It writes crds/<plural>.<group>.yaml, the same text as a template of the chart, and the reference page. ``--check``
compares instead and exits with 1. A structural schema allows less than JSON Schema: references are inlined, titles are
dropped, and optional fields may be absent but not null. Defaults and examples are appended to descriptions, because
``kubectl explain`` prints nothing else of a field.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specdecode_operator.api.reference_page import reference_page
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
    """Return the CustomResourceDefinition as a manifest."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # `helm uninstall` leaves it: removing a CRD removes every object of its kind.
        "metadata": {"name": f"{PLURAL}.{GROUP}", "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["sdd"],
                "categories": ["specdecode"],
            },
            "versions": [_version()],
        },
    }


def text() -> str:
    """Return the CRD as YAML, equal from run to run."""
    head = f"# Made by `make crds` from {VERSION}.py; do not edit.\n"
    return head + yaml.dump(crd(), Dumper=_PlainDumper, sort_keys=False, width=120)


def structural(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pydantic JSON schema to a structural schema of Kubernetes."""
    return _convert(schema, schema.get("$defs", {}))


def root_schema() -> dict[str, Any]:
    """Return the structural schema of the whole resource."""
    name = f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')"
    return {
        "type": "object",
        "description": "Model that is served with speculative decoding tuned from measurements.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            "metadata": {"type": "object"},
            "spec": structural(Spec.model_json_schema(by_alias=True)),
            # The API server must not fill status in: a default there would look like an observation.
            "status": structural(_without_defaults(Status.model_json_schema(by_alias=True))),
        },
        "x-kubernetes-validations": [rule(name, NAME_MESSAGE), rule(SELF_SPLIT_RULE, SELF_SPLIT_MESSAGE)],
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": list(COLUMNS),
        "schema": {"openAPIV3Schema": root_schema()},
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
    made = text()
    return {
        root / "docs" / "reference" / "resource.md": reference_page(root_schema()),
        root / "crds" / f"{PLURAL}.{GROUP}.yaml": made,
        root / "helm" / "specdecode" / "templates" / "crd.yaml": _CHART_HEAD + made + _CHART_TAIL,
    }


def main() -> int:
    """Write or compare the generated files and return the exit code."""
    parser = argparse.ArgumentParser(
        description="generate crds/*.yaml, the chart's copy and docs/reference/resource.md from the models"
    )
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
