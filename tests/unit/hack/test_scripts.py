"""hack/venv, hack/demo and hack/demo-down in a folder of their own, with stand-ins for the programs that they call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.kube import ROOT

UV = """\
echo "$1" >>uv.log
[ "$1" != pip ] || [ ! -e disk-is-full ] || exit 1
[ "$1" != venv ] || { mkdir .venv .venv/bin && ln -s /bin/sh .venv/bin/python; }
"""
DOCKER = """\
case "$*" in *"--file operator/"*) digest=sha256:0f ;; *) digest=sha256:1e ;; esac
while [ "$1" != --metadata-file ]; do shift; done
echo "  \\"containerimage.digest\\": \\"$digest\\"" >"$2"
"""
KUBECTL = """\
case "$*" in
*"-o jsonpath={.status.conditions"*) exit 1 ;;
wait*) [ -e asked ] || { touch asked; exit 1; } ;;
*imageID*) echo "sha256:0f sha256:1e" ;;
*acceptanceRate*) echo "0.5|1.2" ;;
port-forward*) echo "Forwarding from 127.0.0.1:8000"; exec sleep 60 ;;
esac
"""


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)


def run(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    return subprocess.run(
        [folder / script], env={**os.environ, **path, **environment}, capture_output=True, text=True, timeout=30
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the scripts, the requirement files, and the programs that hack/venv has brought before."""
    (tmp_path / "requirements").mkdir()
    for name in ("build", "dev", "embedded"):
        (tmp_path / "requirements" / f"{name}.txt").write_text(name)
    for name in ("pyproject.toml", "simulator/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    shutil.copytree(ROOT / "hack", tmp_path / "hack", ignore=lambda *_: ["cluster"])
    program(tmp_path / ".tools/bin/uv", UV)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3.11").symlink_to(Path(sys.executable).resolve())
    digest = subprocess.check_output(["sha256sum", "requirements/build.txt"], cwd=tmp_path)
    (tmp_path / ".tools/made-from").write_bytes(digest)
    assert run(tmp_path, "hack/venv").returncode == 0
    (tmp_path / "uv.log").unlink()
    return tmp_path


def test_an_environment_that_was_changed_by_halves_is_filled_again(checkout: Path) -> None:
    """Another branch's requirements end in the middle, and the branch before is checked out again."""
    assert run(checkout, "hack/venv").returncode == 0
    assert not (checkout / "uv.log").exists(), "nothing has changed"
    (checkout / "requirements/dev.txt").write_text("other")
    (checkout / "disk-is-full").touch()
    assert run(checkout, "hack/venv").returncode != 0
    (checkout / "disk-is-full").unlink()
    (checkout / "uv.log").unlink()
    (checkout / "requirements/dev.txt").write_text("dev")
    assert run(checkout, "hack/venv").returncode == 0
    assert (checkout / "uv.log").read_text().split() == ["pip"] * 3


def test_an_environment_whose_python_is_gone_is_made_again(checkout: Path) -> None:
    python = checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/no/such/python")
    (checkout / "requirements/dev.txt").write_text("newer")
    done = run(checkout, "hack/venv")
    assert done.returncode == 0, done.stderr
    assert python.exists()


def test_the_demo_of_another_cluster_waits_through_a_moment_without_answer(checkout: Path) -> None:
    """The API server does not answer when the demo asks what it waits for. Digests are read back from the checkout."""
    for name, script in {"bin/docker": DOCKER, "bin/kubectl": KUBECTL, ".venv/bin/helm": 'echo "$@" >helm.log'}.items():
        program(checkout / name, script)
    for name in (".venv/bin/python", ".venv/bin/kubectl-specdecode", "hack/watch-depth"):
        (checkout / name).unlink(missing_ok=True)
        program(checkout / name, "")
    done = run(checkout, "hack/demo", CLUSTER="current", IMAGE_PREFIX="registry.example/me")
    assert done.returncode == 0, done.stderr
    assert "It stays up" in done.stderr
    assert (checkout / "asked").exists()
    assert "image=sha256:0f" in (checkout / "helm.log").read_text()
    assert {path.name for path in (checkout / "out").glob("image-*")} == {"image-operator.json", "image-worker.json"}


def test_the_end_of_a_demo_without_its_kind_removes_the_operator(checkout: Path) -> None:
    """The demo ended before the chart was installed whole: `kubectl delete` knows no SpecDecodeDeployment."""
    program(checkout / "bin/kubectl", "exit 1")
    program(checkout / ".venv/bin/helm", 'echo "$@" >helm.log')
    done = run(checkout, "hack/demo-down", CLUSTER="current")
    assert done.returncode == 0, done.stderr
    assert (checkout / "helm.log").read_text().startswith("uninstall specdecode ")
