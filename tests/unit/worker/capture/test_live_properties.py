"""Property: any order of plans, requests and deletions leaves no record that the last rules forbid."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from specdecode_worker.capture import Record, Recorder
from specdecode_worker.capture.live import CaptureLimits
from specdecode_worker.contract.capture import CaptureRules
from support.worker.captures import live, read, record, settle

BASE_SECONDS = 1e9
"""Time of all recorders. Records and ``delete_before`` lie up to 20 seconds before it."""
LIMITS = CaptureLimits(retry=0.2, hang=60, tick=0.02)
"""On a busy machine, a thread that waits for the processor must not count as hung: its queue would be dropped."""
TASKS, USERS = ("code", "qa"), ("", "ann", "bob")

STEPS = ("request",) * 10 + ("plan",) * 4 + ("settle",) * 4 + ("begin", "end") * 3 + ("delete",)


def some_rules(draw: random.Random) -> CaptureRules | None:
    if draw.random() < 0.15:
        return None
    return CaptureRules(
        share=draw.choice((1.0, 1.0, 0.0)),
        task_shares={"code": draw.choice((1.0, 1.0, 0.0))},
        consent=draw.choice(("OptOut", "OptOut", "OptIn")),
        delete_before=BASE_SECONDS - draw.randint(0, 20),
        redact=draw.choice((None, None, "support.worker.redaction_hooks:odd_ones")),
    )


@dataclass
class Requests:
    """Requests as the server would run them, and what was true when each of them began and ended."""

    recorder: Recorder
    current: CaptureRules | None
    running: list[tuple[Record, int, CaptureRules]] = field(default_factory=list)
    ended: dict[int, tuple[Record, CaptureRules | None, bool]] = field(default_factory=dict)
    """Record, rules at its end, and whether its user was deleted since, by number."""
    epoch_of: dict[int, int] = field(default_factory=dict)
    number: int = 0

    def begin(self, task: str, permitted: bool, age: int, user: str) -> None:
        recorder = self.recorder
        if self.current is None or (recorder.consent == "OptIn" and not permitted) or not recorder.should_capture(task):
            return
        assert recorder.share_of(task) > 0
        self.number += 1
        made = record(self.number, task=task, time_seconds=BASE_SECONDS - age)
        made = msgspec.structs.replace(made, user=recorder.subject_of(user), permitted=permitted)
        self.running.append((made, recorder.epoch, self.current))

    def request(self, task: str, permitted: bool, age: int, user: str) -> None:
        before = len(self.running)
        self.begin(task, permitted, age, user)
        self.end(before)

    def end(self, index: int) -> None:
        if index < len(self.running):
            made, epoch, _ = self.running.pop(index)
            self.ended[made.sampling.seed] = (made, self.current, False)
            self.epoch_of[made.sampling.seed] = epoch
            self.recorder.enqueue(made, epoch)

    def delete(self, user: str) -> None:
        subject = self.recorder.subject_of(user)
        self.recorder.delete_user(user)
        for number, (made, at_end, deleted) in self.ended.items():
            self.ended[number] = (made, at_end, deleted or made.user == subject)

    def is_allowed(self, made: Record) -> bool:
        _, at_end, deleted = self.ended[made.sampling.seed]
        now = self.current
        return (
            now is not None
            and not deleted
            and self.epoch_of[made.sampling.seed] == self.recorder.epoch
            and made.time_seconds >= now.delete_before
            and (made.permitted or now.consent == "OptOut")
            and not (at_end is now and now.redact is not None and made.sampling.seed % 2 == 0)
        )


def run(folder: Path, draw: random.Random) -> None:
    """Run a random order of steps and compare the folder with the last rules."""
    first = some_rules(draw)
    with live(folder, first, LIMITS, clock=lambda: BASE_SECONDS) as recorder:
        done = Requests(recorder, first)
        for step in draw.choices(STEPS, k=40):
            if step == "plan":
                done.current = some_rules(draw)
                recorder.apply(done.current)
            elif step == "settle":
                settle(recorder)
            elif step == "delete":
                done.delete(draw.choice(USERS[1:]))
            elif step == "end":
                done.end(0)
            else:
                permitted, age = draw.random() < 0.5, draw.randint(0, 20)
                getattr(done, step)(draw.choice(TASKS), permitted, age, draw.choice(USERS))
        settle(recorder)
        stored_records = read(folder)
        assert [made for made in stored_records if not done.is_allowed(made)] == []
        report = recorder.report()
        assert (report.conversations, report.problem) == (len(stored_records), None)
        assert report.oldest == min((made.time_seconds for made in stored_records), default=None)
        assert done.current is not None or not list(folder.iterdir())
        under_last = {number for number, (_, at_end, _) in done.ended.items() if at_end is done.current}
        expected = {number for number in under_last if done.is_allowed(done.ended[number][0])}
        assert expected <= {made.sampling.seed for made in stored_records}, "what the last rules permit is there"


@pytest.mark.parametrize("part", range(4))
def test_no_record_stays_that_the_last_rules_forbid(part: int, tmp_path: Path) -> None:
    for number in range(40):
        folder = tmp_path / str(number)
        folder.mkdir()
        run(folder, random.Random(f"{part}/{number}"))
