"""``distill --job``: one document for every result, time over restarts, and the same draft after SIGKILL.

Nothing is learnt from records that no worker wrote. Captured text in the data of a run and of replayed runs is no
older than allowed, and goes with the verdict.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from specdecode_worker.capture import Record
from specdecode_worker.capture.segments import Retention, store_retention
from specdecode_worker.contract import MAX_VERDICT_BYTES, Artifact
from specdecode_worker.contract.distillation import (
    MAX_DOMAINS,
    DistillationVerdict,
    DomainGain,
    GainBounds,
    shortened_name,
    shortened_reason,
)
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.training.conversations import Chat
from specdecode_worker.training.distillation import judge
from specdecode_worker.training.distillation.pipeline import Distillation, failure_kind
from specdecode_worker.training.distillation.publication import RunClock
from specdecode_worker.training.distillation.records import read_records_of
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.prompts import PromptLine, Question
from specdecode_worker.training.split_target import TargetPlacement
from support.tiers import skip_reason
from support.waiting import until
from support.worker.distillation_runs import noise, run, run_job, write

pytestmark = pytest.mark.slow

EARLIER_SECONDS = 1000.0


def test_job_exits_with_0_and_writes_the_verdict(
    flags: list[str], tmp_path: Path, message: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "clock.json").write_text(json.dumps({"seconds": EARLIER_SECONDS}))
    verdict = run_job(message, flags, out)
    assert (verdict.verdict, verdict.failure) == ("inconclusive", None)
    assert "64 conversations" in verdict.reasons[0]
    assert verdict.draft == Artifact(uri=f"file://{out / 'head'}", hash=model_hash(out / "head"))
    assert {(d.name, d.kind) for d in verdict.domains} >= {("alpha", "captured"), ("golden/g", "golden")}
    assert verdict.gain.lower <= verdict.gain.estimate <= verdict.gain.upper
    assert 60 < verdict.conversations <= 90
    assert EARLIER_SECONDS < verdict.seconds < EARLIER_SECONDS + 300
    assert DistillationVerdict.model_validate_json(capsys.readouterr().out) == verdict
    repeated = run_job(message, flags, out)
    assert (repeated.draft, repeated.gain, repeated.verdict) == (verdict.draft, verdict.gain, verdict.verdict)


def test_without_golden_prompts_the_captured_traffic_alone_decides(
    flags: list[str], tmp_path: Path, message: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at, out = flags.index("--golden"), tmp_path / "out"
    without = [*flags[:at], *flags[at + 2 :]]
    assert {one.kind for one in run_job(message, without, out).domains} == {"captured"}
    assert json.loads((out / "head" / "lineage.json").read_text())["golden"] == {}
    assert run([word for word in without if word != "--job"], tmp_path / "other") == 1
    assert "--golden is needed without --job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "failure", "named"),
    [
        (["--golden", "/nowhere.jsonl"], "input", "/nowhere.jsonl"),
        (["--draft", "file:///nowhere"], "input", "/nowhere"),
        (["--replay", "/nowhere", "--replay-share", "0.5"], "input", "/nowhere"),
        (["--replay-share", "1"], "input", "--replay-share is 1.0"),
        (["--steps", "0"], "input", "--steps"),
        (["--time-limit", "0"], "input", "--time-limit"),
        (["--time-limit", "0.01"], "time-limit", "--time-limit"),
        (["--capture", "/nowhere"], "capture", "/nowhere"),
        (["--capture-from", "127.0.0.1:9"], "capture", "SPECDECODE_CAPTURE_TOKEN"),
    ],
)
def test_failure_is_a_document(
    more: list[str], failure: str, named: str, flags: list[str], tmp_path: Path, message: Path
) -> None:
    verdict = run_job(message, flags, tmp_path / "out", *more)
    assert (verdict.verdict, verdict.failure) == ("failed", failure)
    assert named in verdict.reasons[0]


def test_resumed_run_fetches_no_segments_again(
    flags: list[str], tmp_path: Path, message: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDECODE_CAPTURE_TOKEN", "t")
    out, gone = tmp_path / "out", ("--capture-from", "127.0.0.1:9")
    refused = run_job(message, flags, out, *gone)
    assert (refused.failure, "127.0.0.1" in refused.reasons[0]) == ("capture", True)
    assert run_job(message, flags, out, "--keep-data").verdict == "inconclusive"
    (out / "verdict.json").unlink()
    assert run_job(message, flags, out, *gone).verdict == "inconclusive", "the workers of the first run may be gone"
    assert not (out / "data").exists()
    assert run_job(message, flags, out, *gone).verdict == "inconclusive", "nor does a run with a verdict fetch again"


def test_prompts_that_change_while_a_run_is_stopped_are_not_those_of_its_lineage(
    flags: list[str], golden: Path, tmp_path: Path, message: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "out", hashlib.sha256(golden.read_bytes()).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "_prepare_data", Mock(side_effect=OSError("stopped")))
        assert run_job(message, flags, out).failure == "error"
    golden.write_text(golden.read_text().replace("number", "no."))  # as in a ConfigMap that is edited
    assert run_job(message, flags, out).verdict == "inconclusive"
    assert json.loads((out / "head" / "lineage.json").read_text())["golden"] == {"sha256": asked}


def test_prompts_that_change_while_they_are_read_have_the_hash_of_those_that_are_asked(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, folder = hashlib.sha256(golden.read_bytes()).hexdigest(), tmp_path / "out"

    def change(lines: Sequence[PromptLine], chat: Chat) -> list[Question]:
        assert [line.text for line in lines] == [f"Golden number {i}" for i in range(4)]
        golden.write_text("edited")
        return [Question((1,), 0.0, "g")]

    monkeypatch.setattr(judge, "greedy", change)
    monkeypatch.setattr(judge, "prepare_causal_lm", Mock(side_effect=OSError("stopped")))
    placement = TargetPlacement(folder=tmp_path, dtype="float32", device=torch.device("cpu"))
    with pytest.raises(OSError, match="stopped"):
        judge.answer_prompts(placement, None, {folder: golden}, answer_tokens=1, stopped=lambda: False)  # type: ignore
    assert folder.with_suffix(".sha256").read_text() == asked


def test_a_file_that_a_kill_left_half_written_is_no_part_of_the_candidate(
    flags: list[str], tmp_path: Path, message: Path
) -> None:
    out = tmp_path / "out"
    draft = run_job(message, flags, out, "--keep-data").draft
    (out / "verdict.json").unlink()
    (out / "best" / "model.safetensors.partial").write_text("half of it")
    assert run_job(message, flags, out).draft == draft
    assert not list((out / "head").glob("*.partial"))


def test_time_limit_counts_over_restarts(flags: list[str], tmp_path: Path, message: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "clock.json").write_text(json.dumps({"seconds": EARLIER_SECONDS}))
    verdict = run_job(message, flags, out, "--time-limit", str(EARLIER_SECONDS))
    assert (verdict.failure, verdict.seconds >= EARLIER_SECONDS) == ("time-limit", True)
    continued = run_job(message, flags, out, "--time-limit", str(EARLIER_SECONDS + 300))
    assert continued.verdict == "inconclusive", "the same run goes on with more time"


def test_clock_goes_on_after_a_restart_and_survives_a_broken_file(tmp_path: Path) -> None:
    now = [100.0]
    path = tmp_path / "out" / "clock.json"
    first = RunClock(path, 50, lambda: now[0])
    now[0] = 130.0
    first.save()
    second = RunClock(path, 50, lambda: now[0])
    now[0] = 149.0
    assert (second.seconds, second.is_over) == (49.0, False)
    now[0] = 150.0
    assert second.is_over
    path.write_text("{")
    assert RunClock(path, 50, lambda: now[0]).seconds == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a file system of 600 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip(skip_reason("root", "a file system cannot be mounted here"))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_a_document(flags: list[str], small_disk: Path, message: Path) -> None:
    verdict = run_job(message, flags, small_disk / "out")
    assert (verdict.verdict, verdict.failure) == ("failed", "disk-full")


@pytest.mark.parametrize(
    "write_large",
    [
        lambda path: save_file({"large": torch.zeros(2**20)}, path),
        lambda path: torch.save(torch.zeros(2**20), path),
        lambda path: path.write_bytes(bytes(2**20)),
    ],
)
def test_full_disk_is_known_by_the_errors_of_each_writer(
    write_large: Callable[[Path], object], small_disk: Path
) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - each library has its own
        write_large(small_disk / "file")
    assert failure_kind(raised.value) == "disk-full"


def test_missing_memory_is_known_by_its_errors() -> None:
    for allocate in (lambda: torch.empty(2**50), lambda: bytearray(2**60)):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            allocate()
        assert failure_kind(raised.value) == "out-of-memory"
    wrapped = TrainingError("cannot go on")
    wrapped.__cause__ = MemoryError()
    assert failure_kind(wrapped) == "out-of-memory"


def test_document_fits_the_termination_message() -> None:
    gain = GainBounds(estimate=-0.12345, lower=-0.12345, upper=-0.12345)
    domains = tuple(
        DomainGain(name=shortened_name("\u2603" * 99), kind="golden", conversations=10**6, gain=gain)
        for _ in range(MAX_DOMAINS)
    )
    reasons = tuple(shortened_reason('"\n' * 300) for _ in range(8))
    text = DistillationVerdict(verdict="worse", domains=domains, reasons=reasons, gain=gain).message()
    assert len(text.encode()) <= MAX_VERDICT_BYTES
    parsed = DistillationVerdict.model_validate_json(text)
    assert parsed.domains_left_out + len(parsed.domains) == MAX_DOMAINS
    assert (parsed.verdict, parsed.gain) == ("worse", gain)


def test_killed_training_goes_on_to_the_same_draft(flags: list[str], tmp_path: Path) -> None:
    long = [*flags, "--steps", "24", "--round-steps", "3"]
    messages = {}

    def start(name: str) -> subprocess.Popen[bytes]:
        messages[name] = tmp_path / f"{name}.message"
        variables = {**os.environ, "SPECDECODE_TERMINATION_LOG": str(messages[name]), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "specdecode_worker", "distill", *long, "--out", str(tmp_path / name)]
        return subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start("whole").wait(240) == 0
    killed = start("killed")
    until((tmp_path / "killed" / "checkpoint.pt").exists, 120)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    state = torch.load(tmp_path / "killed" / "checkpoint.pt", weights_only=True)
    assert state["progress"]["step"] < 24, "it was killed amid the training"
    assert not messages["killed"].exists()
    assert start("killed").wait(240) == 0
    whole, resumed = (
        DistillationVerdict.model_validate_json(messages[name].read_text()) for name in ("whole", "killed")
    )
    assert whole.draft.hash == resumed.draft.hash


FORGED: dict[str, dict[str, float]] = {
    "share-0": {"share": 0.0},
    "share-negative": {"share": -1.0},
    "share-tiny": {"share": 1e-12},
    "share-nan": {"share": float("nan")},
    "share-infinite": {"share": float("inf")},
    "time-nan": {"time_seconds": float("nan")},
    "time-infinite": {"time_seconds": float("inf")},
    "time-future": {"time_seconds": 1e12},
}
"""Fields of records that no worker writes."""


def forged(kind: str, records: Sequence[Record]) -> list[Record]:
    return [msgspec.structs.replace(record, **FORGED[kind]) for record in records]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (noise, "of the captured text, more than 20%"),
        (partial(forged, "share-nan"), "none that a worker writes"),
        (partial(forged, "time-future"), "none that a worker writes"),
    ],
    ids=["noise", "share-nan", "time-future"],
)
def test_poisoned_capture_teaches_nothing(
    spoil: Callable[[Sequence[Record]], list[Record]], reason: str, flags: list[str], records: Sequence[Record],
    tmp_path: Path, message: Path,
) -> None:  # fmt: skip
    mixed = write(tmp_path / "mixed", [*records[:60], *spoil(records[60:])])
    verdict = run_job(message, flags, tmp_path / "out", "--capture", str(mixed))
    assert (verdict.verdict, verdict.failure, verdict.draft) == ("failed", "poisoned", None)
    assert reason in verdict.reasons[0]
    assert not (tmp_path / "out" / "head").exists()
    assert not (tmp_path / "out" / "checkpoint.pt").exists()
    again = run_job(message, flags, tmp_path / "out", "--capture", str(write(tmp_path / "good", records)))
    assert again.verdict == "inconclusive", "the same run reads again, for good captures may be there by now"


def test_few_forged_records_do_not_change_the_draft(
    flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path
) -> None:
    honest = run_job(message, flags, tmp_path / "honest")
    forged = [msgspec.structs.replace(records[i], opening=f"{i}", **fields) for i, fields in enumerate(FORGED.values())]
    capture = write(tmp_path / "mixed", [*records, *forged])
    mixed = run_job(message, flags, tmp_path / "mixed-out", "--capture", str(capture))
    assert (mixed.draft.hash, mixed.conversations) == (honest.draft.hash, honest.conversations)


def test_few_changed_records_are_dropped(
    flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path
) -> None:
    mixed = write(tmp_path / "mixed", [*records[:85], *noise(records[85:])])
    assert run_job(message, flags, tmp_path / "out", "--capture", str(mixed)).verdict == "inconclusive"


def _fail_at_stage(flags: list[str], out: Path, message: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Run until ``stage`` of the pipeline, which fails as if the disk were full."""
    with monkeypatch.context() as patch:
        patch.setattr(Distillation, stage, Mock(side_effect=OSError(28, "No space left on device")))
        assert run_job(message, flags, out).failure == "disk-full"


@pytest.mark.parametrize("stage", ["_train_student", "_compare_with_deployed"])
def test_resumed_run_goes_on_without_expired_text(
    stage: str, flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    now = time.time()
    aged = [msgspec.structs.replace(record, time_seconds=now - 5000 - i) for i, record in enumerate(records[:45])]
    fresh = [msgspec.structs.replace(record, time_seconds=now - i) for i, record in enumerate(records[45:])]
    capture = write(tmp_path / "dated", [*aged, *fresh])
    store_retention(capture, Retention(1e9, 2**24))
    flags[flags.index("--capture") + 1] = str(capture)
    out = tmp_path / "out"
    _fail_at_stage(flags, out, message, monkeypatch, stage)
    earlier = _stored_times(out)
    assert min(earlier) < now - 4000
    store_retention(capture, Retention(1000.0, 2**24))  # as if the run had been suspended until then
    _fail_at_stage(flags, out, message, monkeypatch, "_compare_with_deployed")
    left = _stored_times(out)
    assert min(left) > now - 1000
    assert left == [time for time in earlier if time > now - 1000]
    assert run_job(message, flags, out, "--keep-data").verdict == "inconclusive"
    assert _stored_times(out) == left


def test_expired_text_of_an_earlier_run_is_deleted_and_not_replayed(
    flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path
) -> None:
    now = time.time()
    first = [msgspec.structs.replace(record, time_seconds=now - 5000) for record in records[:45]]
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "old", first))
    assert run_job(message, flags, tmp_path / "first", "--keep-data").verdict == "inconclusive"
    assert _stored_times(tmp_path / "first")
    fresh = [msgspec.structs.replace(record, time_seconds=now) for record in records[45:]]
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "new", fresh))
    store_retention(tmp_path / "new", Retention(1000.0, 2**24))
    flags[flags.index("--replay-share") + 1] = "0.5"
    second = run_job(message, flags, tmp_path / "second", "--replay", str(tmp_path / "first"))
    assert second.verdict == "inconclusive", "without replayed text the golden set judges alone"
    assert _stored_times(tmp_path / "first") == []


def _stored_times(out: Path) -> list[float]:
    """Return the times of all records whose text a run holds."""
    return sorted(record.time_seconds for path in (out / "data").rglob("*.records") for record in read_records_of(path))
