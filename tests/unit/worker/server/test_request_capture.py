"""Request capture: the recorder at the start of a worker, and text that a replay cannot reproduce is not captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdecode_worker.capture import Dropped, ReadStats, Recorder, read_records
from specdecode_worker.capture.segments import Retention
from specdecode_worker.contract import CaptureConfig, CaptureRules, ModelConfig, Plan, Sampler, WorkerConfig
from specdecode_worker.core.messages import Tokens
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.prompts import Prompt
from specdecode_worker.server.request_capture import RecordBuilder, RequestCapture, open_recorder


@pytest.mark.parametrize(
    ("sampler", "temperature", "grammar", "taken"),
    [("mss", 0.7, "", 0), ("mss", 0.0, "", 1), ("coupled", 0.7, "", 1), ("coupled", 0.0, "choice: Ann Smith", 0)],
)
def test_only_text_that_a_replay_reproduces_is_captured(
    sampler: Sampler, temperature: float, grammar: str, taken: int, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path, CaptureRules(share=1.0))
    capture = RequestCapture(recorder, "t", sampler)
    sampling = Sampling(max_tokens=3, seed=1, temperature=temperature, grammar=grammar)
    builder = capture.start_record(Prompt((1, 2)), sampling, "other")
    if builder is not None:
        end(builder)
    recorder.close()
    assert recorder.counts.records.total() == taken
    assert recorder.counts.dropped[Dropped.not_repeatable] == 1 - taken


def end(builder: RecordBuilder | None) -> None:
    builder.process(Tokens(request_id="r", tokens=(4,)))
    builder.end()


def test_request_that_runs_while_its_user_is_deleted_is_not_captured(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, CaptureRules(share=1.0), read_token=lambda: "token")
    capture = RequestCapture(recorder, "t", "coupled")

    def start(user: str) -> RecordBuilder | None:
        return capture.start_record(Prompt((1, 2)), Sampling(max_tokens=3, seed=1), "other", user, None)

    ann, bob = start("ann"), start("bob")
    capture.delete_user("ann")
    for builder in (ann, bob, start("ann")):
        end(builder)
    recorder.close()
    assert recorder.counts.dropped == {Dropped.deleted: 1}
    assert recorder.counts.records.total() == 2, "later requests of the user are captured"


def test_record_has_the_share_that_it_was_drawn_with(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, CaptureRules(share=1.0))
    capture = RequestCapture(recorder, "t", "coupled")
    builder = capture.start_record(Prompt((1, 2)), Sampling(max_tokens=3, seed=1), "other", None, True)
    recorder.apply(CaptureRules(share=0.25))
    end(builder)
    recorder.close()
    (record,) = read_records([tmp_path], ReadStats())
    assert (record.share, record.permitted) == (1.0, True)


def config(capture: CaptureConfig | None = None, capture_dir: Path | None = None) -> WorkerConfig:
    model = ModelConfig(uri="file:///m", served_name="m")
    return WorkerConfig(model=model, capture=capture, capture_dir=None if capture_dir is None else str(capture_dir))


def test_rules_of_the_configuration_and_of_the_plan(tmp_path: Path) -> None:
    fixed = CaptureConfig(dir=str(tmp_path / "a"), max_bytes=2**20, max_age_seconds=60.0, task_shares={"code": 0.25})
    plan = Plan(capture=CaptureRules(share=0.5))
    recorder = open_recorder(config(fixed, tmp_path / "b"), plan)
    assert recorder.folder == tmp_path / "a"
    assert recorder.retention == Retention(60.0, 2**20)
    assert (recorder.share_of("code"), recorder.share_of("other"), recorder.consent) == (0.25, 1.0, "OptOut")
    recorder.close()
    recorder = open_recorder(config(None, tmp_path / "b"), plan)
    assert (recorder.folder, recorder.share_of("other")) == (tmp_path / "b", 0.5)
    recorder.close()
    assert open_recorder(config(), plan) is None


@pytest.mark.parametrize(
    "wrong",
    [{"redact": f"{name}"} for name in ("no_such_module:f", "json:missing", "json:decoder")] + [{"dir": "/proc/here"}],
)
def test_a_configuration_that_cannot_be_used_is_refused_at_the_start(wrong: dict[str, Any], tmp_path: Path) -> None:
    fixed = CaptureConfig(**{"dir": str(tmp_path), **wrong})
    with pytest.raises(CannotStart, match=next(iter(wrong.values()))):
        open_recorder(config(fixed), Plan())
