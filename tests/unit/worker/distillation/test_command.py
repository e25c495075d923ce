"""The ``distill`` command as a Job runs it: from segments to a draft, a verdict and an exit code, with restarts."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdecode_worker.__main__ import main
from specdecode_worker.capture import Record
from specdecode_worker.commands import distill
from specdecode_worker.training.distillation import students as student_training
from support.worker.distillation_runs import noise, run, write

pytestmark = pytest.mark.slow


@pytest.fixture
def flags(inputs: list[str]) -> list[str]:
    return [*inputs, "--steps", "6", "--learning-rate", "1e-3"]


def test_distill_writes_draft_and_verdict(
    flags: list[str], records: Sequence[Record], draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(flags, out, "--replay-share", "0") == 3
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document == json.loads((out / "verdict.json").read_text())
    assert (document["verdict"], document["exit_code"]) == ("inconclusive", 3)
    assert "64 conversations" in document["reasons"][0], "ninety conversations leave nine to judge by"
    assert set(document["domains"]) == {"alpha", "beta", "golden/g"}
    used = document["capture"]["used"]
    assert sum(used.values()) + sum(document["capture"]["dropped"].values()) == len(records)
    assert used["train"] > 50
    assert used["test"] > 2
    assert document["training"]["rounds"][-1]["step"] == 6
    assert "min left" in said.err
    lineage = json.loads((out / "head" / "lineage.json").read_text())
    assert (lineage["generation"], lineage["data"]["used"]) == (1, used)
    assert lineage["parent"]["uri"] == f"file://{draft}"
    assert lineage["results"]["verdict"] == "inconclusive"
    begin, end = lineage["data"]["window"]
    assert "1970-01-01T00:16:40+00:00" <= begin < end <= "1970-01-01T00:18:09+00:00"
    mix = document["capture"]["mix"]
    assert 0.55 < mix["alpha"] < 0.8, "captured at half the share, each stands for two"


def test_distilled_draft_can_be_distilled_again(
    flags: list[str], tmp_path: Path, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(flags, first, "--replay-share", "0") == 3
    following = ["--draft", f"file://{first / 'head'}", "--replay", str(first)]
    assert run(flags, second, *following) == 3
    lineage = json.loads((second / "head" / "lineage.json").read_text())
    assert lineage["generation"] == 2
    shares = [one["replay_share"] for one in json.loads((second / "verdict.json").read_text())["training"]["rounds"]]
    assert shares[0] == 0.0
    assert all(share >= 0.5 for share in shares[1:])
    golden.write_text(golden.read_text().replace("number", "no."))
    assert run(flags, tmp_path / "third", *following) == 1
    assert "frozen" in capsys.readouterr().err


def test_head_from_elsewhere_replays_answers_to_prompts(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(flags, tmp_path / "none") == 1
    assert "--replay-prompts" in capsys.readouterr().err
    prompts = tmp_path / "replay.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"{i * 7919:x} birds"}], "domain": "r"} for i in range(16)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    assert run(flags, tmp_path / "out", "--replay-prompts", str(prompts)) == 3
    rounds = json.loads((tmp_path / "out" / "verdict.json").read_text())["training"]["rounds"]
    assert all(one["replay_share"] >= 0.5 for one in rounds[1:])
    assert set(rounds[0]["old"]) == {"r"}, "every eighth answer validates"


def test_stopped_run_resumes_to_the_same_draft(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(flags, whole, "--replay-share", "0") == 3
    runs = 0
    for asked in (1, 5, 1, 2, 2, 1, 4):  # stops in golden answers, chunks, rounds and the verdict
        with monkeypatch.context() as patch:
            patch.setattr(distill, "threading", SimpleNamespace(Event=partial(_set_after, asked)))
            runs += run(flags, stopped, "--replay-share", "0") == distill.INTERRUPTED
    assert runs == 7, "each of them was stopped"
    capsys.readouterr()
    assert run(flags, stopped, "--replay-share", "0") == 3
    a, b = (load_file(out / "head" / "model.safetensors") for out in (whole, stopped))
    assert all(torch.equal(a[name], b[name]) for name in a)
    documents = [json.loads((out / "verdict.json").read_text()) for out in (whole, stopped)]
    for document in documents:
        for line in document["training"]["rounds"]:
            del line["minutes"], line["loss"]  # a resumed run measures them over the rest of its round only
    assert documents[0]["training"] == documents[1]["training"]
    assert documents[0]["capture"] == documents[1]["capture"]


def _set_after(polls: int) -> threading.Event:
    """Return an event that counts as set after so many polls."""
    event, answers = threading.Event(), iter([False] * polls)
    event.is_set = lambda: next(answers, True)  # type: ignore[method-assign]
    return event


def test_sigterm_stops_after_the_current_step(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = student_training.Trainer.step

    def signalled(self: Any, batch: Any) -> float:
        signal.raise_signal(signal.SIGTERM)
        return step(self, batch)

    monkeypatch.setattr(student_training.Trainer, "step", signalled)
    handler = signal.getsignal(signal.SIGTERM)
    assert run(flags, tmp_path / "out", "--replay-share", "0") == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert state["progress"]["step"] == 1, "the step that ran was finished and kept"


def test_records_of_noise_are_dropped(flags: list[str], records: Sequence[Record], draft: Path, tmp_path: Path) -> None:
    capture = write(tmp_path / "noise", noise(records))
    assert run(flags, tmp_path / "out", "--capture", str(capture), "--replay-share", "0") == 3
    document = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert document["capture"]["dropped"]["not_reproduced"] + document["capture"]["dropped"].get("overlaps", 0) == 90
    assert document["training"] is None
    a, b = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out" / "head", draft))
    assert all(torch.equal(a[name], b[name]) for name in b), "nothing was learnt from it"


@pytest.mark.parametrize(
    ("out", "more", "named"),
    [
        ("out", ["--publish", "pvc://heads/drafts"], "--publish needs --job"),
        ("next", ["--job", "--prune"], "hexadecimal"),
        ("6740f2a1", ["--job", "--keep-drafts", "0123456789abcdef"], "needs --prune"),
    ],
)
def test_wrong_flags_end_with_64(
    out: str, more: list[str], named: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(flags, tmp_path / out, *more)
    assert ended.value.code == 64
    assert named in capsys.readouterr().err


def test_usage_error_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["distill"])
    assert ended.value.code == 64
    assert "--capture" in capsys.readouterr().err


def test_distill_with_two_ranks_reproduces_and_learns_the_same(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = []
    for size in ("1", "2"):
        more = ("--replay-share", "0", "--steps", "2", "--threads", "1", "--device", "cpu")
        assert run(flags, tmp_path / size, *more, "--tensor-parallel-size", size) == 3
        documents.append(json.loads(capsys.readouterr().out))
    one, two = documents
    assert two["capture"]["used"] == one["capture"]["used"]
    assert two["capture"]["not_reproduced_tokens"] == one["capture"]["not_reproduced_tokens"]
    losses = [[entry["loss"] for entry in document["training"]["rounds"]] for document in documents]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
