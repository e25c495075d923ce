"""Fixtures that render the Helm chart. They need no cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kube import CHART, HELM, ROOT, Manifest


class OneOfEachKey(yaml.CSafeLoader):
    """Reads YAML as Flux does: it refuses an object that has a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key is there twice: {keys}"
        return super().construct_mapping(node, deep)


class Rendered(list[Manifest]):
    """Manifests rendered by one `helm template` run."""

    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self if manifest["kind"] == kind]

    def one(self, kind: str) -> Manifest:
        """Return the only installed manifest of this kind, without the manifests that only `helm test` creates."""
        (installed,) = [manifest for manifest in self.of(kind) if "helm.sh/hook" not in annotations(manifest)]
        return installed

    @property
    def pod(self) -> Manifest:
        """Template of the operator's pods."""
        return self.one("Deployment")["spec"]["template"]  # type: ignore[no-any-return]

    @property
    def container(self) -> Manifest:
        (only,) = self.pod["spec"]["containers"]
        return only  # type: ignore[no-any-return]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the operator, with what the downward API gives the first pod of release `sd`."""
        pod = {"metadata.namespace": "sys", "metadata.name": "sd-specdecode-7d9f-x2x4z"}
        return {
            one["name"]: one["value"] if "value" in one else pod[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in self.container["env"]
        }


class Chart:
    """The project's chart, rendered by helm with values as a user would write them."""

    program = HELM

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self._values = scratch / "values.yaml"

    def helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.program, *arguments], capture_output=True, text=True, timeout=60)

    def try_template(self, values: Mapping[str, Any], *flags: str) -> subprocess.CompletedProcess[str]:
        self._values.write_text(yaml.safe_dump(dict(values)))
        return self.helm(
            "template", "sd", str(self.folder), "--namespace", "sys", "--values", str(self._values), *flags
        )

    def template(self, values: Mapping[str, Any] | None = None, *flags: str) -> Rendered:
        done = self.try_template(values or {}, *flags)
        assert done.returncode == 0, done.stderr
        return Rendered(manifest for manifest in yaml.load_all(done.stdout, OneOfEachKey) if manifest)


def annotations(manifest: Manifest) -> dict[str, str]:
    return manifest["metadata"].get("annotations") or {}


@pytest.fixture
def chart(tmp_path: Path) -> Chart:
    return Chart(CHART, tmp_path)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
