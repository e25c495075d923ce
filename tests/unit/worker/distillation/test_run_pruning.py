"""Deletion of earlier runs and of drafts that are not needed: nothing else goes, whatever lies on the claim."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from specdecode_worker.__main__ import main
from specdecode_worker.models import fetch as model_store
from specdecode_worker.training.distillation import deletion as run_pruning
from specdecode_worker.training.distillation.deletion import (
    RUN_FILES,
    RUN_FOLDERS,
    TEXT_FOLDERS,
    delete_drafts,
    delete_runs,
)
from specdecode_worker.training.distillation.pipeline import Distillation
from specdecode_worker.training.distillation.records import Interrupted, write_samples
from specdecode_worker.training.evaluation import Sample
from support.worker.distillation_runs import run_job

pytestmark = pytest.mark.slow

OWN, EARLIER, EARLIEST, LATER = "6740f2a1", "6740f2a0", "6730aaaa", "6740f2a2"
BEGAN = int(OWN, 16)


def log(_: str) -> None:
    """Ignore a line."""


def make_run(folder: Path) -> Path:
    """Make everything that a run leaves."""
    for name in RUN_FOLDERS:
        (folder / name / "train").mkdir(parents=True)
        (folder / name / "train" / "shard").write_text("text")
    for name in RUN_FILES:
        (folder / name).write_text("x")
    return folder


def make_draft(place: Path, draft: str, *, age: float = 10.0) -> Path:
    """Make a published draft that is ``age`` seconds older than the run OWN."""
    folder = place / draft
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("w")
    (folder / "lineage.json").write_text(json.dumps({"draft": draft}))
    os.utime(folder, (BEGAN - age, BEGAN - age))
    return folder


def tree(folder: Path) -> dict[str, str]:
    """Return everything below a folder, without following links."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else "folder"
        entries[str(path.relative_to(folder))] = kind
    return entries


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return the folder of a deployment's runs on a claim: two earlier ones, its own, and a later one."""
    folder = tmp_path / "claim" / "distillation" / "demo"
    for name in (EARLIEST, EARLIER, OWN, LATER):
        make_run(folder / name)
    return folder


def test_earlier_runs_go_and_the_own_and_later_ones_stay(runs: Path) -> None:
    other = make_run(runs.parent / "other" / EARLIER)
    before = {name: tree(folder) for name, folder in (("own", runs / OWN), ("later", runs / LATER), ("other", other))}
    assert delete_runs(runs / OWN, log)
    assert sorted(path.name for path in runs.iterdir()) == [OWN, LATER]
    assert before == {"own": tree(runs / OWN), "later": tree(runs / LATER), "other": tree(other)}
    assert delete_runs(runs / OWN, log, with_own=True)
    assert [path.name for path in runs.iterdir()] == [LATER]
    assert delete_runs(runs / "nothing" / OWN, log), "a claim without runs"


def test_what_distill_does_not_make_stays(runs: Path) -> None:
    (runs / "notes").mkdir()
    (runs / "notes" / "data").mkdir()
    (runs / "6740f29f").write_text("a file with the name of a run")
    (runs / EARLIER / "mine.txt").write_text("mine")
    (runs / EARLIEST / "verdict.json").unlink()
    (runs / EARLIEST / "verdict.json").mkdir()
    lines: list[str] = []
    assert delete_runs(runs / OWN, lines.append)
    assert sorted(path.name for path in runs.iterdir()) == [EARLIEST, "6740f29f", EARLIER, OWN, LATER, "notes"]
    assert (runs / "notes" / "data").is_dir()
    assert tree(runs / EARLIER) == {"mine.txt": "mine"}, "its text is gone all the same"
    assert tree(runs / EARLIEST) == {"verdict.json": "folder"}
    assert any("did not make mine.txt" in line for line in lines)


@pytest.mark.parametrize("name", ["golden", "replay"])
def test_samples_that_a_stop_left_half_written_go_with_their_run(name: str, runs: Path) -> None:
    def stopped() -> Iterator[Sample]:
        raise Interrupted
        yield

    with pytest.raises(Interrupted):
        write_samples(runs / EARLIER / name, stopped())
    assert (runs / EARLIER / f"{name}.partial").is_dir()
    assert delete_runs(runs / OWN, log)
    assert sorted(path.name for path in runs.iterdir()) == [OWN, LATER]


@pytest.mark.parametrize("place", ["run", "entry", "inside", "deployment", "root"])
def test_links_are_not_followed(place: str, runs: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside" / EARLIER)
    before = tree(tmp_path / "outside")
    own = runs / OWN
    match place:
        case "run":
            (runs / "6740f29f").symlink_to(outside, target_is_directory=True)
        case "entry":
            shutil.rmtree(runs / EARLIER / "data")
            (runs / EARLIER / "data").symlink_to(outside / "data", target_is_directory=True)
            (runs / EARLIER / "clock.json").unlink()
            (runs / EARLIER / "clock.json").symlink_to(outside / "clock.json")
        case "inside":
            (runs / EARLIER / "data" / "link").symlink_to(outside, target_is_directory=True)
        case "deployment":
            own = runs.with_name("linked") / OWN
            own.parent.symlink_to(outside.parent, target_is_directory=True)
        case _:
            own = tmp_path / "root" / "demo" / OWN
            make_run(tmp_path / "real" / "demo" / EARLIER)
            own.parent.parent.symlink_to(tmp_path / "real", target_is_directory=True)
    delete_runs(own, log)
    assert tree(tmp_path / "outside") == before
    assert not (tmp_path / "real").exists() or (tmp_path / "real" / "demo" / EARLIER / "data").is_dir()
    if place == "run":
        assert (runs / "6740f29f").is_symlink()
    if place == "entry":
        assert set(tree(runs / EARLIER)) == {"clock.json", "data"}
    if place == "inside":
        assert not (runs / EARLIER).exists()


@pytest.mark.parametrize("deletions", range(1, 12, 3))
def test_a_deletion_that_was_killed_is_completed_by_the_next(
    deletions: int, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, real = [deletions], os.unlink

    def killed(*words: object, **names: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(*words, **names)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_runs(runs / OWN, log)
    assert sum(kind != "folder" for kind in tree(runs / EARLIEST).values()) < len(RUN_FOLDERS | RUN_FILES)
    assert delete_runs(runs / OWN, log)
    assert sorted(path.name for path in runs.iterdir()) == [OWN, LATER]


def test_text_goes_first(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    real = run_pruning._remove
    monkeypatch.setattr(run_pruning, "_remove", lambda folder: (gone.append(folder.name), real(folder)))
    delete_runs(runs / EARLIEST, log, with_own=True)
    assert set(gone[: len(TEXT_FOLDERS)]) == TEXT_FOLDERS


def test_a_file_system_that_refuses_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "unlink", Mock(side_effect=OSError(30, "Read-only file system")))
    lines: list[str] = []
    assert not delete_runs(runs / OWN, lines.append)
    assert any("Read-only file system" in line for line in lines)
    assert main(["capture", "prune", str(runs / OWN)]) == 1


NEEDED, OLD, NEWER, FOREIGN = "0123456789abcdef", "1123456789abcdef", "2123456789abcdef", "3123456789abcdef"


def test_drafts_go_unless_they_are_needed_or_newer_than_the_run(tmp_path: Path) -> None:
    place = tmp_path / "drafts" / "demo"
    other = make_draft(place.with_name("other"), OLD)
    make_draft(place, NEEDED)
    make_draft(place, OLD)
    make_draft(place, NEWER, age=-10)
    assert delete_drafts(place, {NEEDED}, BEGAN, log)
    assert sorted(path.name for path in place.iterdir()) == [NEEDED, NEWER]
    assert other.is_dir()


FOREIGN_FORMS: dict[str, Callable[[Path], object]] = {
    "no lineage": lambda folder: (folder / "lineage.json").unlink(),
    "another hash": lambda folder: (folder / "lineage.json").write_text(json.dumps({"draft": OLD})),
    "list": lambda folder: (folder / "lineage.json").write_text("[]"),
    "torn": lambda folder: (folder / "lineage.json").write_text("{"),
    "folder inside": lambda folder: (folder / "mine").mkdir(),
    "link": lambda folder: folder.symlink_to(folder.rename(folder.parents[2] / FOREIGN), target_is_directory=True),
    "name": lambda folder: folder.rename(folder.with_name("week-47")),
    "file": lambda folder: (folder / "notes.txt").write_text("mine"),
}
"""Changes that make a draft a folder that distill did not publish."""


@pytest.mark.parametrize("form", FOREIGN_FORMS)
def test_folders_that_distill_did_not_publish_stay(form: str, tmp_path: Path) -> None:
    place = tmp_path / "drafts" / "demo"
    FOREIGN_FORMS[form](make_draft(place, FOREIGN))
    (folder,) = place.iterdir()
    os.utime(folder, (BEGAN - 9, BEGAN - 9))
    before = tree(tmp_path)
    assert delete_drafts(place, frozenset(), BEGAN, log)
    assert tree(tmp_path) == before


def test_a_draft_disappears_at_once_and_its_deletion_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "drafts" / "demo"
    make_draft(place, OLD)
    (place / f".{NEWER}.abcd").mkdir()  # a publication that runs now
    (place / ".snapshot").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(run_pruning, "_remove", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            delete_drafts(place, frozenset(), BEGAN, log)
    assert not (place / OLD).exists()
    (place / f".{FOREIGN}.abcd").mkdir()  # of a publication that was killed
    os.utime(place / f".{FOREIGN}.abcd", (BEGAN - 9, BEGAN - 9))
    assert delete_drafts(place, frozenset(), BEGAN, log)
    assert sorted(path.name for path in place.iterdir()) == [f".{NEWER}.abcd", ".snapshot"]


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a mounted claim named ``heads``, with earlier runs and drafts."""
    monkeypatch.setattr(model_store, "CLAIMS", tmp_path / "mnt")
    folder = tmp_path / "mnt" / "heads"
    make_run(folder / "distillation" / "demo" / EARLIER)
    make_run(folder / "distillation" / "other" / EARLIER)
    for draft in (NEEDED, OLD):
        make_draft(folder / "drafts" / "demo", draft)
    return folder


def test_a_job_deletes_earlier_runs_and_goes_on_with_its_own(
    flags: list[str], claim: Path, message: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = claim / "distillation" / "demo" / OWN
    more = ["--prune", f"--keep-drafts={NEEDED}", "--publish", "pvc://heads/drafts/demo"]
    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "_compare_with_deployed", Mock(side_effect=OSError("stopped")))
        assert run_job(message, flags, out, *more).failure == "error"
    assert not (out.parent / EARLIER).exists()
    assert [path.name for path in (claim / "drafts" / "demo").iterdir()] == [NEEDED]
    assert (claim / "distillation" / "other" / EARLIER / "data").is_dir()
    assert {path.name for path in out.iterdir()} <= RUN_FOLDERS | RUN_FILES
    summary = (out / "data" / "summary.json").stat().st_ino
    answers = [(path.name, path.stat().st_ino) for path in sorted((out / "golden").iterdir())]
    make_run(out.parent / EARLIER)  # of a process that ended late

    def seen(*_: object) -> bool:
        make_run(out.parent / EARLIEST)
        assert (out / "data" / "summary.json").stat().st_ino == summary, "a resumed run keeps its data"
        assert [(path.name, path.stat().st_ino) for path in sorted((out / "golden").iterdir())] == answers
        return False

    monkeypatch.setattr(Distillation, "_check_not_poisoned", seen)
    verdict = run_job(message, flags, out, *more)
    assert verdict.verdict == "inconclusive"
    assert [path.name for path in out.parent.iterdir()] == [OWN], "runs that appeared meanwhile are deleted at the end"
    assert not (set(os.listdir(out)) & TEXT_FOLDERS)
    assert {path.name for path in (claim / "drafts" / "demo").iterdir()} == {NEEDED, verdict.draft.hash}
    assert run_job(message, flags, out, *more).draft == verdict.draft, "a Job that is repeated names the same draft"
    assert main(["capture", "prune", str(out)]) == 0
    assert list(out.parent.iterdir()) == [], "a real run has nothing of an unknown form"


def test_a_job_with_keep_data_keeps_its_text(flags: list[str], claim: Path, message: Path) -> None:
    out = claim / "distillation" / "demo" / OWN
    assert run_job(message, flags, out, "--prune", "--keep-data").verdict == "inconclusive"
    assert (out / "data").is_dir()
    assert sorted(path.name for path in (claim / "drafts" / "demo").iterdir()) == [NEEDED, OLD], "no hashes are named"


def test_prune_refuses_folders_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "training" / "mine")
    assert main(["capture", "prune", str(tmp_path / "training" / "mine")]) == 1
    assert "not named by the time of a run" in capsys.readouterr().err
    assert (tmp_path / "training" / "mine" / "data").is_dir()
