"""A distillation run from captured records to a published candidate."""

from __future__ import annotations

import errno
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specdecode_worker.capture import CaptureError
from specdecode_worker.contract import Artifact, TreeShape
from specdecode_worker.contract.distillation import (
    MAX_DOMAINS,
    DistillationFailure,
    DistillationVerdict,
    DomainGain,
    GainBounds,
    shortened_name,
    shortened_reason,
)
from specdecode_worker.drafts.draft_files import read_calibration
from specdecode_worker.files import write_json
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.training.artifacts import Ancestor, read_lineage
from specdecode_worker.training.distillation.judge import (
    Comparison,
    Golden,
    compare_drafts,
    exclude_overlapping,
    golden_set,
    runs_of_samples,
)
from specdecode_worker.training.distillation.pool import Pool, Weighted, read_pool, split_pool
from specdecode_worker.training.distillation.records import (
    CaptureSelection,
    Stopped,
    Summary,
    prepare_shards,
    read_samples,
    union_of_runs,
)
from specdecode_worker.training.distillation.students import StudentData, StudentSettings, StudentTraining
from specdecode_worker.training.errors import PoisonedCapture, PublishFailed, TimeLimitReached, TrainingError
from specdecode_worker.training.evaluation import CalibratedDraft, Sample, write_calibration
from specdecode_worker.training.heads import Distillable, load_distillable, method_in, prepare_draft
from specdecode_worker.training.rollout import GeneratedText
from specdecode_worker.training.unroll import vocabulary_of

# Document of a distillation Job: from the verdict of a run, or from the error that ended it.

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# safetensors and torch.save raise errors of their own, with the number of the system's error or without it.
_NO_SPACE_TEXT = re.compile(
    rf"No space left on device|Disk quota exceeded|os error ({errno.ENOSPC}|{errno.EDQUOT})\b"
    r"|PytorchStreamWriter failed|inline_container.*unexpected pos|iostream error"
)
_NO_MEMORY_TEXT = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|bad_alloc")
_MAX_REASONS = 8


def verdict_document(document: Mapping[str, Any], draft: Artifact, seconds: float) -> DistillationVerdict:
    """Return the Job's document for a verdict of ``distill``.

    Args:
        document: Content of verdict.json.
        draft: The candidate.
        seconds: Time of the run.
    """
    domains = [
        DomainGain(name=shortened_name(name), kind=part["kind"], conversations=part["conversations"], gain=part["gain"])
        for name, part in document["domains"].items()
    ]
    for name, pool in document["pools"].items():
        count = sum(document["domains"][member]["conversations"] for member in pool["domains"])
        domains.append(DomainGain(name=shortened_name(name), kind="pool", conversations=count, gain=pool["gain"]))
    gain = document["gain"]
    return DistillationVerdict(
        verdict=document["verdict"],
        reasons=tuple(shortened_reason(reason) for reason in document["reasons"][:_MAX_REASONS]),
        gain=None if gain is None else GainBounds.model_validate(gain),
        domains=tuple(domains[:MAX_DOMAINS]),
        domains_left_out=max(0, len(domains) - MAX_DOMAINS),
        draft=draft,
        conversations=sum(sum(counts.values()) for counts in document["capture"]["conversations"].values()),
        seconds=round(seconds, 1),
    )


def failure_document(error: BaseException, seconds: float) -> DistillationVerdict:
    """Return the Job's document for an error that ended the run."""
    return DistillationVerdict(
        verdict="failed",
        failure=failure_kind(error),
        reasons=(shortened_reason(str(error) or type(error).__name__),),
        seconds=round(seconds, 1),
    )


def failure_kind(error: BaseException) -> DistillationFailure:
    """Return the kind of failure of an error, from the error itself and those that caused it."""
    chain = list(_chain(error))
    if any(_is_disk_full(one) for one in chain):
        return "disk-full"
    if any(_is_out_of_memory(one) for one in chain):
        return "out-of-memory"
    match error:
        case PoisonedCapture():
            return "poisoned"
        case TimeLimitReached():
            return "time-limit"
        case PublishFailed():
            return "publish"
        case CaptureError():
            return "capture"
        case TrainingError() | ModelError():
            return "input"
    return "error"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def _is_disk_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in _NO_SPACE) or bool(_NO_SPACE_TEXT.search(str(error)))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY_TEXT.search(str(error)))


# The distillation pipeline: from captured traffic to a candidate draft and a verdict on it.
#
#     OUT/target.json                the target, which stays the same over all restarts
#     OUT/data/                      accepted records by split, with the target's states (records.py)
#     OUT/golden/                    answers to the golden prompts; golden.sha256 is the hash of their file
#     OUT/replay/                    answers to the prompts of --replay-prompts, with replay.sha256
#     OUT/checkpoint.pt, OUT/best/   state of the training (students.py)
#     OUT/head/                      the candidate: weights, calibration.json, lineage.json
#     OUT/verdict.json               written once, at the end; a further run returns it unchanged
#
# Every stage resumes where it stopped: repeat a preempted run with the same flags.

_VERDICT = "verdict.json"
CLOCK_TOLERANCE_SECONDS = 300.0
"""Largest difference between the clocks of the workers and of this process. Later records are dropped."""
VALIDATION_CONVERSATIONS = 64
"""Most conversations of a captured domain used for validation, which runs after every round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSettings:
    """Parameters of one distillation run. ``parent`` is the deployed draft.

    ``replay`` are the runs that made the deployed draft. ``replay_prompts`` is a file of prompts whose answers by the
    target are replayed as well; a draft from elsewhere has no runs. ``oldest_seconds`` is the Unix time before which
    records are ignored. ``most_tokens`` limits the training text, captured and replayed each. ``wanted_gain`` is the
    relative gain in tokens per second that a better candidate must
    exceed. A run ends with PoisonedCapture if the target does not reproduce more than ``max_not_reproduced`` of the
    captured text, or if more than this share of the records is malformed or from the future.
    """

    target: Ancestor
    parent: Ancestor
    capture: tuple[Path, ...]
    golden: Path | None
    replay: tuple[Path, ...]
    replay_prompts: Path | None
    out: Path
    settings: StudentSettings
    shape: TreeShape
    wanted_gain: float
    oldest_seconds: float = 0.0
    most_tokens: int = 400_000
    golden_tokens: int = 128
    max_not_reproduced: float = 1.0

    @property
    def asked(self) -> dict[Path, Path]:
        """File of prompts of each folder of answers."""
        asked = {self.golden_folder: self.golden} if self.golden is not None else {}
        if self.replay_prompts is not None and self.settings.replay_share:
            asked[self.replay_folder] = self.replay_prompts
        return asked

    @property
    def golden_folder(self) -> Path:
        """Folder of the answers to the golden prompts."""
        return self.out / "golden"

    @property
    def replay_folder(self) -> Path:
        """Folder of the answers to the prompts that are replayed."""
        return self.out / "replay"


def stored_verdict(out: Path) -> dict[str, Any] | None:
    """Return the document of a run that has its verdict, or None."""
    path = out / _VERDICT
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text())
    return document


class Distillation:
    """Stages of a distillation run, in order.

    ``log`` receives progress lines. ``stopped`` is polled between pieces of work and ends the run when it returns
    True.
    """

    def __init__(
        self,
        target: CausalLM,
        answers: Mapping[Path, Sequence[GeneratedText]],
        job: DistillationSettings,
        log: Callable[[str], None],
        stopped: Stopped,
    ) -> None:
        self._target, self._answers, self._job, self._log, self._stopped = target, answers, job, log, stopped

    def run(self) -> dict[str, Any]:
        """Run all remaining stages, and write and return the document of the verdict.

        Raises:
            TrainingError: The inputs cannot be used; the message says why.
            CaptureError: The capture folders cannot be read.
            Interrupted: ``stopped`` returned True.
        """
        golden = self._load_golden()
        summary = self._prepare_data(golden)
        self._log(
            f"distill: {sum(summary.used.values())} of {summary.records} records used, dropped: {summary.dropped}"
        )
        self._check_not_poisoned(summary)
        training_run = self._train_student(golden, summary)
        training = None if training_run is None else {"rounds": training_run.history, "best_round": training_run.best}
        document = self._compare_with_deployed(golden, summary)
        document |= {"draft": str(self._job.out / "head"), "capture": asdict(summary), "training": training}
        self._write_lineage(golden, summary, document)
        write_json(self._job.out / _VERDICT, document, indent=2)
        return document

    def _load_golden(self) -> Golden:
        """Return the golden set, checked against the one that the deployed draft was judged by."""
        job = self._job
        if job.golden is None:
            return Golden(None, (), runs_of_samples(()))
        golden = self._answered(job.golden_folder)
        frozen = read_lineage(job.parent.folder).get("golden", {}).get("sha256", golden.sha256)
        if frozen != golden.sha256:
            raise TrainingError(
                f"{job.golden} is not the golden set that the deployed draft was judged by (its lineage.json says "
                f"{frozen[:12]}); it is frozen, so that generations can be compared: name that file, and another --out"
            )
        return golden

    def _prepare_data(self, golden: Golden) -> Summary:
        """Replay the captured records into shards and return their summary."""
        job = self._job
        source = CaptureSelection(
            folders=job.capture,
            target=job.target.hash,
            positions=self._target.config.max_position_embeddings,
            oldest_seconds=job.oldest_seconds,
            newest_seconds=time.time() + CLOCK_TOLERANCE_SECONDS,
            judged=golden.runs,
            most_tokens=job.most_tokens,
        )
        return prepare_shards(self._target, source, job.out / "data", self._log, self._stopped)

    def _check_not_poisoned(self, summary: Summary) -> None:
        """Raise PoisonedCapture if too much of the captured text is not the target's own."""
        share, most = summary.not_reproduced_share, self._job.max_not_reproduced
        if summary.invalid_share > most:
            raise PoisonedCapture(
                f"{summary.invalid_share:.0%} of the captured records, more than {most:.0%}, are none that a worker "
                f"writes: forged, or written by a worker with a wrong clock ({summary.dropped}); nothing was learnt"
            )
        if share > most:
            raise PoisonedCapture(
                f"the target does not reproduce {share:.0%} of the captured text, more than {most:.0%}: it was changed "
                "by a redaction hook, forged, or served by another target or dtype; nothing was learnt from it"
            )

    def _train_student(self, golden: Golden, summary: Summary) -> StudentTraining | None:
        """Train the candidate and write it to OUT/head.

        Return None if there is no conversation to train on; the candidate is then a copy of the deployed draft.
        """
        head_folder = self._job.out / "head"
        if not summary.used.get("train"):
            self._log("distill: no captured conversation is left to learn from")
            shutil.copytree(self._job.parent.folder, head_folder, dirs_exist_ok=True)
            return None
        student_data = self._student_data(golden, summary)
        origin = self._load(self._job.parent.folder, torch.float32, torch.device("cpu"))
        output_VE = self._target.lm_head.weight
        head = prepare_draft(origin, self._target, vocabulary_of(origin, len(output_VE)).clone())
        training_run = StudentTraining(
            head.to(output_VE.device), self._target, student_data, self._job.settings, self._job.out,
            target_folder=self._job.target.folder,
        )  # fmt: skip
        training_run.run(self._log, self._stopped)
        # A kill may have left a file half written there, which no later write has replaced.
        unfinished = shutil.ignore_patterns("*.partial")
        shutil.copytree(self._job.out / "best", head_folder, dirs_exist_ok=True, ignore=unfinished)
        texts = [sample.conversation for sample in student_data.validation] + list(student_data.old_validation)
        if texts:
            best = self._load(head_folder, output_VE.dtype)
            write_calibration(best, texts, self._target, output_VE, head_folder, depth=self._job.settings.depth)
        return training_run

    def _student_data(self, golden: Golden, summary: Summary) -> StudentData:
        """Return the texts for training and validation."""
        data = self._job.out / "data"
        train = list(read_samples(data / "train"))
        validation, test = (list(read_samples(data / split)) for split in ("validation", "test"))
        pool = self._replay_pool(golden, validation + test)
        return StudentData(
            captured=[Weighted(sample.conversation, 1 / sample.record.share) for sample in train],
            replay=pool.training,
            validation=_few(validation),
            old_validation=pool.validation,
            weights=summary.mix,
        )

    def _replay_pool(self, golden: Golden, judging: list[Sample]) -> Pool:
        """Return the text to replay, without conversations that share a run of tokens with the evaluation texts."""
        job = self._job
        if not job.settings.replay_share:
            return Pool()
        if not job.replay and job.replay_prompts is None:
            raise TrainingError(
                "nothing to replay: name the --out of the parent's training with --replay, prompts that the target "
                "answers with --replay-prompts where the draft comes from elsewhere, or want none with --replay-share 0"
            )
        pool = read_pool(job.replay, most_tokens=job.most_tokens, oldest_seconds=job.oldest_seconds)
        if job.replay_prompts is not None:
            answered = self._answered(job.replay_folder)
            more = split_pool([sample.conversation for sample in answered.samples])
            pool = Pool(pool.training + more.training, pool.validation + more.validation)
        training = exclude_overlapping(pool.training, union_of_runs([golden.runs, runs_of_samples(judging)]))
        domains = {conversation.domain for conversation in pool.training}
        self._log(f"distill: replay of {len(training)} conversations in {len(domains)} domains; "
                   f"{len(pool.training) - len(training)} share a run of tokens with what judges")  # fmt: skip
        return Pool(training, pool.validation)

    def _answered(self, folder: Path) -> Golden:
        """Return the samples of the answered prompts in ``folder``."""
        return golden_set(self._target, folder, self._answers.get(folder, ()), self._stopped)

    def _compare_with_deployed(self, golden: Golden, summary: Summary) -> dict[str, Any]:
        """Compare the candidate with the deployed draft and return the document of the verdict."""
        job = self._job
        comparison = Comparison(
            deployed=self._load_calibrated(job.parent.folder),
            candidate=self._load_calibrated(job.out / "head"),
            samples=[*read_samples(job.out / "data" / "test"), *golden.samples],
            weights=summary.mix,
            shape=job.shape,
            wanted_gain=job.wanted_gain,
        )
        return compare_drafts(self._target, comparison, self._log, self._stopped)

    def _load_calibrated(self, folder: Path) -> CalibratedDraft:
        return CalibratedDraft(
            self._load(folder, self._target.lm_head.weight.dtype), read_calibration(folder).sharpness
        )

    def _load(self, folder: Path, dtype: torch.dtype, device: torch.device | None = None) -> Distillable:
        """Load a head, by default to the device of the target."""
        place = device or self._target.lm_head.weight.device
        return load_distillable(folder, self._target, self._job.target.folder, dtype, place)

    def _write_lineage(self, golden: Golden, summary: Summary, document: dict[str, Any]) -> None:
        """Write OUT/head/lineage.json: target, parent, data, settings and results."""
        job, head = self._job, self._job.out / "head"
        begin, end = (datetime.fromtimestamp(t, UTC).isoformat(timespec="seconds") for t in summary.window_seconds)
        settings = asdict(job.settings) | {"replay": [str(path) for path in job.replay], "shape": str(job.shape)}
        lineage = {
            "method": method_in(head),
            "made_by": "distill",
            "target": {"uri": job.target.uri, "hash": job.target.hash},
            "draft": model_hash(head),
            "parent": {"uri": job.parent.uri, "hash": job.parent.hash},
            "generation": read_lineage(job.parent.folder).get("generation", 0) + 1,
            "data": {
                "window": [begin, end],
                "hash": summary.sha256,
                "records": summary.records,
                "used": summary.used,
                "dropped": summary.dropped,
                "mix": summary.mix,
            },
            "golden": {"sha256": golden.sha256} if golden.sha256 else {},
            "settings": settings | {"wanted_gain": job.wanted_gain},
            "results": {
                name: document[name] for name in ("verdict", "reasons", "gain", "domains", "step_milliseconds")
            },
        }
        write_json(head / "lineage.json", lineage, indent=2)


def _few(samples: list[Sample]) -> list[Sample]:
    """Return at most ``VALIDATION_CONVERSATIONS`` samples of each domain."""
    counts: Counter[str] = Counter()
    chosen = []
    for sample in samples:
        counts[sample.record.task] += 1
        if counts[sample.record.task] <= VALIDATION_CONVERSATIONS:
            chosen.append(sample)
    return chosen
