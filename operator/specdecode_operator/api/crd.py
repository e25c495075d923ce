"""Makes the CRD of the pydantic models: ``python -m specdecode_operator.api.crd [--check]``.

Writes crds/<plural>.<group>.yaml and the chart's template of the same text; ``--check`` compares instead and exits 1.
A structural schema is narrower than JSON Schema: references are inlined, titles dropped, optional fields become
absent fields, exclusive bounds become flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specdecode_operator.api.v1alpha1 import (
    COLUMNS,
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    PLURAL,
    VERSION,
    Spec,
    Status,
)

_DROPPED = {"title", "$defs", "additionalProperties"}
_CHART_HEAD = "{{- if .Values.crds.enabled }}\n"
_CHART_TAIL = "{{- end }}\n"


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition as a manifest."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # Kept by `helm uninstall`: removing a CRD removes every object of its kind.
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
    """The CRD as YAML, stable from run to run."""
    head = f"# Made by `make crds` from {VERSION}.py; do not edit.\n"
    return head + yaml.dump(crd(), Dumper=_PlainDumper, sort_keys=False, width=120)


def structural(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A pydantic JSON schema as Kubernetes' structural schema."""
    return _convert(schema, schema.get("$defs", {}))


def _version() -> dict[str, Any]:
    rule = f"self.metadata.name.size() <= {MAX_NAME_LENGTH}"
    schema = {
        "type": "object",
        "description": "A model served with speculative decoding that tunes itself.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(Spec.model_json_schema(by_alias=True)),
            # The API server must not fill status in: a default there would look like an observation.
            "status": structural(_without_defaults(Status.model_json_schema(by_alias=True))),
        },
        "x-kubernetes-validations": [
            {"rule": rule, "message": f"metadata.name must have at most {MAX_NAME_LENGTH} characters"}
        ],
    }
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
        "schema": {"openAPIV3Schema": schema},
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
        elif key == "items":
            out[key] = _convert(value, defs)
        elif key == "const":
            out["enum"] = [value]
        elif key == "default" and "properties" in node:
            out[key] = {}  # the API server fills the fields in from their own defaults
        else:
            out[key] = value
    return out


def _resolve(node: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    """Follows $ref and drops the null of Optional; what stands beside them wins."""
    found = dict(node)
    while "$ref" in found or "anyOf" in found:
        if "$ref" in found:
            inner = defs[found.pop("$ref").rsplit("/", 1)[-1]]
        else:
            (inner,) = [option for option in found.pop("anyOf") if option.get("type") != "null"]
        found = {**inner, **found}
    return found


class _PlainDumper(yaml.SafeDumper):
    """YAML without anchors: shared lists would become &id001."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _targets(root: Path) -> dict[Path, str]:
    made = text()
    return {
        root / "crds" / f"{PLURAL}.{GROUP}.yaml": made,
        root / "helm" / "specdecode" / "templates" / "crd.yaml": _CHART_HEAD + made + _CHART_TAIL,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="make crds/*.yaml and the chart's copy from the pydantic models")
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
