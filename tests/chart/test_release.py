"""`hack/release`: versions agree, the chart names the images, and the plugin runs without the rest of the project."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from support.kube import ROOT


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the program as a module that writes into a folder of its own."""
    loader = importlib.machinery.SourceFileLoader("release_program", str(ROOT / "hack" / "release"))
    spec = importlib.util.spec_from_loader("release_program", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "release_program", module)
    loader.exec_module(module)
    monkeypatch.setattr(module, "DIST", tmp_path)
    return module


def test_all_files_name_one_version(release: ModuleType) -> None:
    assert release.agreed_version() == yaml.safe_load((ROOT / "helm/specdecode/Chart.yaml").read_text())["version"]


def test_versions_that_differ_are_refused(release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "helm/specdecode/Chart.yaml",
        "CHANGELOG.md",
        "pyproject.toml",
        "operator/kubectl-plugin/pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    chart = tmp_path / "helm/specdecode/Chart.yaml"
    chart.write_text(chart.read_text().replace("\nversion: ", "\nversion: 9"))
    monkeypatch.setattr(release, "ROOT", tmp_path)
    with pytest.raises(release.Refused, match=r"versions differ: helm/specdecode/Chart.yaml 9"):
        release.agreed_version()


@pytest.mark.slow
def test_chart_names_the_images_of_the_release(release: ModuleType) -> None:
    assert "registry.example" in release.chart("0.1.0", "registry.example/me")


@pytest.mark.slow
def test_plugin_is_small_and_runs_without_torch(release: ModuleType) -> None:
    assert "runs without torch" in release.plugin("0.1.0")


def test_sboms_have_every_pinned_package(release: ModuleType, tmp_path: Path) -> None:
    release.sboms("0.1.0")
    for name in ("operator", "worker"):
        document = json.loads((tmp_path / f"specdecode-{name}-0.1.0.python.spdx.json").read_text())
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        assert len(document["packages"]) == sum("==" in line and line[0].isalnum() for line in lines)


@pytest.fixture
def commands(release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the commands of a push, whose programs are stand-ins. Each step without files is left out."""
    ran: list[str] = []

    def run(*words: object, cwd: Path = ROOT) -> str:
        ran.append(" ".join(str(word).removeprefix(f"{release.BIN}/") for word in words))
        if "--metadata-file" in words:
            Path(str(words[-2])).write_text('{"containerimage.digest": "sha256:0f"}')
        return "registry.example/me/specdecode-operator:0.1.0"

    (tmp_path / "CHANGELOG.md").write_text("## 0.1.0 (2026-12-01)\n")
    for name in ("helm", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "run", run)
    monkeypatch.setattr(release, "DIST", tmp_path / "dist")
    monkeypatch.setattr(release, "agreed_version", lambda: "0.1.0")
    monkeypatch.setattr(release, "plugin", lambda version: "")
    monkeypatch.setattr(release.shutil, "which", lambda name: name)
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr(release.sys, "argv", ["release", "--push"])
    monkeypatch.setenv("REGISTRY", "registry.example/me")
    monkeypatch.setenv("TORCH_INDEX", "https://index.example")
    return ran


def test_a_push_without_all_that_it_needs_begins_nothing(
    release: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCH_INDEX")
    monkeypatch.setattr(release.shutil, "which", lambda name: None if name == "cosign" else name)
    assert release.main() == 1
    assert "--push needs $TORCH_INDEX, cosign" in capsys.readouterr().err
    assert commands == []


def test_a_push_of_an_unreleased_version_is_refused(
    release: ModuleType, commands: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "CHANGELOG.md").write_text("## 0.1.0 (unreleased)\n")
    assert release.main() == 1
    assert "write the date" in capsys.readouterr().err
    assert commands == []


def test_the_chart_is_pushed_when_its_images_are_there(release: ModuleType, commands: list[str]) -> None:
    assert release.main() == 0
    pushes = [line.split()[0] for line in commands if line.startswith(("docker buildx build", "helm push"))]
    assert pushes == ["docker"] * len(release.IMAGES) + ["helm"]
    assert sum(line.startswith("cosign sign ") for line in commands) == len(release.IMAGES) + 1, "and the chart"
