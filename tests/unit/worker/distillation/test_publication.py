"""Publication of candidates: a complete folder named by its hash, or none, and the verdict names it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from specdecode_worker.contract import Artifact
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.training.distillation.publication import check_place, publish
from specdecode_worker.training.errors import PublishFailed
from support.worker.job_runs import read, run

pytestmark = pytest.mark.slow


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a mounted claim named ``heads``."""
    monkeypatch.setattr(model_store, "CLAIMS", tmp_path / "mnt")
    folder = tmp_path / "mnt" / "heads"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def head(draft: Path, tmp_path: Path) -> Path:
    """Return a head with a calibration and a lineage."""
    folder = tmp_path / "head"
    shutil.copytree(draft, folder)
    (folder / "calibration.json").write_text("{}")
    (folder / "lineage.json").write_text("{}")
    return folder


@pytest.mark.parametrize("prefix", ["pvc://heads/drafts/sql", "pvc://heads/drafts/sql/", "pvc://heads"])
def test_draft_is_published_under_its_hash(prefix: str, claim: Path, head: Path) -> None:
    check_place(prefix)
    artifact = publish(head, prefix)
    assert artifact == Artifact(uri=f"{prefix.rstrip('/')}/{model_hash(head)}", hash=model_hash(head))
    folder = model_store.resolve(artifact.uri)
    assert folder.is_relative_to(claim)
    assert {path.name for path in folder.iterdir()} == {path.name for path in head.iterdir()}
    assert model_hash(folder) == artifact.hash
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755, "workers have another user"
    before = folder.stat().st_ino
    assert publish(head, prefix) == artifact
    assert folder.stat().st_ino == before, "a repeated run copies nothing"
    assert [path.name for path in folder.parent.iterdir()] == [artifact.hash]


def test_leftovers_of_a_killed_run_are_removed(claim: Path, head: Path) -> None:
    draft_hash = model_hash(head)
    (claim / f".{draft_hash}.killed").mkdir()
    (claim / draft_hash).mkdir()
    (claim / draft_hash / "config.json").write_text("{")
    publish(head, "pvc://heads")
    assert [path.name for path in claim.iterdir()] == [draft_hash]
    assert model_hash(claim / draft_hash) == draft_hash


def test_unpublished_draft_is_not_visible(claim: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = shutil.copyfile

    def tear(source: Path, target: Path) -> None:
        copied(source, target)
        if target.suffix == ".safetensors":
            os.truncate(target, target.stat().st_size // 2)

    monkeypatch.setattr(shutil, "copyfile", tear)
    with pytest.raises(PublishFailed, match="other contents"):
        publish(head, "pvc://heads")
    assert list(claim.iterdir()) == []


@pytest.mark.parametrize(
    ("prefix", "named"),
    [
        ("pvc://other/drafts", "other is not mounted"),
        ("pvc://heads/../../etc", "names no folder in a claim"),
        ("hf://org/name", "cannot be published"),
        ("drafts", "cannot be published"),
        ("file:///proc/drafts", "cannot be written"),
    ],
)
def test_place_that_cannot_be_used_is_named(prefix: str, named: str, claim: Path) -> None:
    with pytest.raises(PublishFailed, match=named):
        check_place(prefix)


def test_job_publishes_after_its_verdict(flags: list[str], claim: Path, tmp_path: Path, message: Path) -> None:
    out = tmp_path / "out"
    assert run(flags, out, "--publish", "pvc://other/drafts") == 0
    refused = read(message)
    assert (refused.verdict, refused.failure) == ("failed", "publish")
    assert not (out / "golden").exists(), "it is found out before the work"
    assert run(flags, out, "--publish", "pvc://heads/drafts") == 0
    verdict = read(message)
    assert verdict.verdict == "inconclusive"
    published = claim / "drafts" / verdict.draft.hash
    assert verdict.draft.uri == f"pvc://heads/drafts/{verdict.draft.hash}"
    assert model_hash(published) == verdict.draft.hash == model_hash(out / "head")
    assert {"calibration.json", "lineage.json"} <= {path.name for path in published.iterdir()}


def test_publish_without_job_is_wrong_usage(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags.remove("--job")
    with pytest.raises(SystemExit) as ended:
        run(flags, tmp_path / "out", "--publish", "pvc://heads/drafts")
    assert ended.value.code == 64
    assert "--publish needs --job" in capsys.readouterr().err
