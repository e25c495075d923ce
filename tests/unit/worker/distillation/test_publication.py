"""Publication of candidates: a complete folder named by its hash, or none, and the verdict names it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdecode_worker.__main__ import main
from specdecode_worker.capture import Record
from specdecode_worker.contract import Artifact
from specdecode_worker.contract.distillation import DistillationVerdict
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.training.distillation.publication import Ancestor, check_place, check_same_target, publish
from specdecode_worker.training.errors import PublishFailed, ResumeMismatch
from support.worker.captured_folders import write

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


@pytest.fixture
def flags(model: Path, draft: Path, golden: Path, records: Sequence[Record], tmp_path: Path) -> list[str]:
    capture = write(tmp_path / "capture", records)
    words = ["distill", "--job", "--model", f"file://{model}", "--draft", f"file://{draft}", "--capture", str(capture)]
    words += ["--golden", str(golden), "--dtype", "float32", "--steps", "2", "--round-steps", "2", "--threads", "1"]
    return [*words, "--max-tokens", "12", "--replay-share", "0", "--out", str(tmp_path / "out")]


def read(path: Path) -> DistillationVerdict:
    text = path.read_text()
    path.unlink()
    return DistillationVerdict.model_validate_json(text)


def test_job_publishes_after_its_verdict(
    flags: list[str], claim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = tmp_path / "message"
    monkeypatch.setenv("SPECDECODE_TERMINATION_LOG", str(message))
    assert main([*flags, "--publish", "pvc://other/drafts"]) == 0
    refused = read(message)
    assert (refused.verdict, refused.failure) == ("failed", "publish")
    assert not (tmp_path / "out" / "golden").exists(), "it is found out before the work"
    assert main([*flags, "--publish", "pvc://heads/drafts"]) == 0
    verdict = read(message)
    assert verdict.verdict == "inconclusive"
    published = claim / "drafts" / verdict.draft.hash
    assert verdict.draft.uri == f"pvc://heads/drafts/{verdict.draft.hash}"
    assert model_hash(published) == verdict.draft.hash == model_hash(tmp_path / "out" / "head")
    assert {"calibration.json", "lineage.json"} <= {path.name for path in published.iterdir()}


def test_publish_without_job_is_wrong_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags.remove("--job")
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--publish", "pvc://heads/drafts"])
    assert ended.value.code == 64
    assert "--publish needs --job" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_another_target(tmp_path: Path) -> None:
    for _ in range(2):
        check_same_target(tmp_path, Ancestor("s3://models/m", tmp_path, "a" * 16))
    with pytest.raises(ResumeMismatch, match="another --out"):
        check_same_target(tmp_path, Ancestor("s3://models/m", tmp_path, "b" * 16))
