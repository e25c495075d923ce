"""Manifests of the operator's kind and of children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION
from support.operators.fleet import SPEC, deep

NAME_LABEL = f"{GROUP}/name"


def config_map(namespace: str, name: str, parent: str = "x", **data: str) -> dict[str, Any]:
    """Return a ConfigMap with the labels of a child of ``parent``."""
    labels = {f"{GROUP}/role": "worker", NAME_LABEL: parent}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def owned(manifest: dict[str, Any], uid: str, name: str = "x", kind: str = KIND) -> dict[str, Any]:
    """Return the manifest with a controller."""
    reference = {
        "apiVersion": f"{GROUP}/{VERSION}" if kind == KIND else "v1",
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def without_owner(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest without owners that do not exist: the garbage collector would delete the object."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return {**manifest, "metadata": metadata}


def resource(name: str, **spec: Any) -> dict[str, Any]:
    """Return a SpecDecodeDeployment without replicas: every child is made but pods."""
    fields = deep({**SPEC, "replicas": 0}, spec)
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": name}, "spec": fields}
