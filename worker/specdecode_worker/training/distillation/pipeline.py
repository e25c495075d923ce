"""The distillation pipeline: from captured traffic to a candidate draft and a verdict on it.

    OUT/data/                      accepted records by split, with the target's states (record_shards.py)
    OUT/golden/                    answers to the golden prompts
    OUT/checkpoint.pt, OUT/best/   state of the training (student_training.py)
    OUT/head/                      the candidate: weights, calibration.json, lineage.json
    OUT/verdict.json               written once, at the end; a further run returns it unchanged

Every stage resumes where it stopped: repeat a preempted run with the same flags.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdecode_worker.contract import TreeShape
from specdecode_worker.engine.drafts.draft_loader import read_sharpness
from specdecode_worker.models.checkpoints.weights import load_eagle3, weights_hash
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.artifacts.distillation_lineage import Ancestor, lineage, read_lineage
from specdecode_worker.training.data.chat_tokens import Chat
from specdecode_worker.training.distillation.mixture import Weighted
from specdecode_worker.training.distillation.record_shards import Source, Stopped, Summary, prepare, read_samples
from specdecode_worker.training.distillation.replay_pool import Pool, read_pool
from specdecode_worker.training.distillation.splits import united
from specdecode_worker.training.distillation.student_training import Lessons, Study, StudySettings
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.evaluation.candidate_judge import Trial, decide
from specdecode_worker.training.evaluation.draft_calibration import write_calibration
from specdecode_worker.training.evaluation.golden_set import Golden, apart_from, golden_set, runs_of_samples
from specdecode_worker.training.evaluation.paired_steps import Drafted, Sample
from specdecode_worker.training.heads.continued_head import continued_head

VALIDATION_CONVERSATIONS = 64
"""Most conversations of a captured domain used for validation, which runs after every round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parameters of one distillation run. ``parent`` is the deployed draft.

    ``oldest_seconds`` is the Unix time before which records are ignored. ``most_tokens`` limits the training text,
    captured and replayed each. ``wanted_gain`` is the relative gain in tokens per second that a better candidate must
    exceed.
    """

    target: Ancestor
    parent: Ancestor
    capture: tuple[Path, ...]
    golden: Path
    replay: tuple[Path, ...]
    out: Path
    settings: StudySettings
    shape: TreeShape
    wanted_gain: float
    oldest_seconds: float = 0.0
    most_tokens: int = 400_000
    golden_tokens: int = 128


class Distillation:
    """Stages of a distillation run, in order.

    ``tell`` receives progress lines. ``stopped`` is polled between pieces of work and ends the run when it returns
    True.
    """

    def __init__(self, target: Llama, chat: Chat, job: Job, tell: Callable[[str], None], stopped: Stopped) -> None:
        self._target, self._chat, self._job, self._tell, self._stopped = target, chat, job, tell, stopped

    def run(self) -> dict[str, Any]:
        """Run all remaining stages and return the document of the verdict.

        Raises:
            TrainingError: The inputs cannot be used; the message says why.
            CaptureError: The capture folders cannot be read.
            Interrupted: ``stopped`` returned True.
        """
        path = self._job.out / "verdict.json"
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        self._job.out.mkdir(parents=True, exist_ok=True)
        golden = self._golden()
        summary = self._summary(golden)
        self._tell(
            f"distill: {sum(summary.used.values())} of {summary.records} records used, dropped: {summary.dropped}"
        )
        study = self._study(golden, summary)
        document = self._verdict(golden, summary) | self._account(summary, study)
        self._write_lineage(golden, summary, document)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=2) + "\n")
        os.rename(partial, path)
        return document

    def _golden(self) -> Golden:
        """Return the golden set, checked against the one that the deployed draft was judged by."""
        job = self._job
        self._tell(f"distill: answering the golden prompts of {job.golden}")
        golden = golden_set(
            self._target, self._chat, job.golden, job.out / "golden", answer_tokens=job.golden_tokens,
            stopped=self._stopped,
        )  # fmt: skip
        frozen = read_lineage(job.parent.folder).get("golden", {}).get("sha256", golden.sha256)
        if frozen != golden.sha256:
            raise TrainingError(
                f"{job.golden} is not the golden set that the deployed draft was judged by (its lineage.json says "
                f"{frozen[:12]}); it is frozen, so that generations can be compared: name the same file"
            )
        return golden

    def _summary(self, golden: Golden) -> Summary:
        """Replay the captured records into shards and return their summary."""
        job = self._job
        source = Source(
            folders=job.capture,
            target=job.target.hash,
            positions=self._target.config.max_position_embeddings,
            oldest_seconds=job.oldest_seconds,
            judged=golden.runs,
            most_tokens=job.most_tokens,
        )
        return prepare(self._target, source, job.out / "data", self._tell, self._stopped)

    def _study(self, golden: Golden, summary: Summary) -> Study | None:
        """Train the candidate and write it to OUT/head.

        Return None if there is no conversation to train on; the candidate is then a copy of the deployed draft.
        """
        head_folder = self._job.out / "head"
        if not summary.used.get("train"):
            self._tell("distill: no captured conversation is left to learn from")
            shutil.copytree(self._job.parent.folder, head_folder, dirs_exist_ok=True)
            return None
        lessons = self._lessons(golden, summary)
        origin = self._load(self._job.parent.folder, torch.float32)
        head = continued_head(origin, self._target, origin.target_ids.clone())
        output_VE, eos = self._target.lm_head.weight, self._target.config.eos_token_ids
        study = Study(head, output_VE, lessons, self._job.settings, self._job.out, eos)
        study.run(self._tell, self._stopped)
        shutil.copytree(self._job.out / "best", head_folder, dirs_exist_ok=True)
        texts = [sample.conversation for sample in lessons.validation] + list(lessons.old_validation)
        if texts:
            best = self._load(head_folder, output_VE.dtype)
            write_calibration(best, texts, output_VE, head_folder, depth=self._job.settings.depth)
        return study

    def _lessons(self, golden: Golden, summary: Summary) -> Lessons:
        """Return the texts for training and validation."""
        data = self._job.out / "data"
        train = list(read_samples(data / "train"))
        validation, test = (list(read_samples(data / split)) for split in ("validation", "test"))
        pool = self._pool(golden, validation + test)
        return Lessons(
            captured=[Weighted(sample.conversation, 1 / sample.record.share) for sample in train],
            replay=pool.training,
            validation=_few(validation),
            old_validation=pool.validation,
            weights=summary.mix,
        )

    def _pool(self, golden: Golden, judging: list[Sample]) -> Pool:
        """Return the text to replay, without conversations that share a run of tokens with the evaluation texts."""
        job = self._job
        if not job.settings.replay_share:
            return Pool()
        if not job.replay:
            raise TrainingError("nothing to replay: name the --out of the parent's training with --replay, or want "
                                "none with --replay-share 0")  # fmt: skip
        pool = read_pool(job.replay, most_tokens=job.most_tokens)
        kept = apart_from(pool.training, united([golden.runs, runs_of_samples(judging)]))
        self._tell(f"distill: replay of {len(kept)} conversations in {len(pool.domains)} domains; "
                   f"{len(pool.training) - len(kept)} share a run of tokens with what judges")  # fmt: skip
        return Pool(kept, pool.validation)

    def _verdict(self, golden: Golden, summary: Summary) -> dict[str, Any]:
        """Compare the candidate with the deployed draft and return the document of the verdict."""
        job = self._job
        trial = Trial(
            deployed=self._drafted(job.parent.folder),
            candidate=self._drafted(job.out / "head"),
            samples=[*read_samples(job.out / "data" / "test"), *golden.samples],
            weights=summary.mix,
            shape=job.shape,
            wanted_gain=job.wanted_gain,
        )
        return decide(self._target, trial, self._tell, self._stopped)

    def _drafted(self, folder: Path) -> Drafted:
        return Drafted(self._load(folder, self._target.lm_head.weight.dtype), read_sharpness(folder))

    def _load(self, folder: Path, dtype: torch.dtype) -> Eagle3Head:
        return load_eagle3(folder, self._target, dtype=dtype, device=torch.device("cpu"))

    def _account(self, summary: Summary, study: Study | None) -> dict[str, Any]:
        """Return the part of the document that describes the data and the training."""
        training = None if study is None else {"rounds": study.history, "best_round": study.best}
        return {"draft": str(self._job.out / "head"), "capture": asdict(summary), "training": training}

    def _write_lineage(self, golden: Golden, summary: Summary, document: dict[str, Any]) -> None:
        """Write OUT/head/lineage.json."""
        job, head = self._job, self._job.out / "head"
        settings = asdict(job.settings) | {"replay": [str(path) for path in job.replay], "shape": str(job.shape)}
        found = lineage(
            target=job.target,
            parent=job.parent,
            draft=weights_hash(head),
            summary=summary,
            golden_sha256=golden.sha256,
            settings=settings | {"wanted_gain": job.wanted_gain},
            results={name: document[name] for name in ("verdict", "reasons", "gain", "domains", "step_milliseconds")},
        )
        (head / "lineage.json").write_text(json.dumps(found, indent=2) + "\n")


def _few(samples: list[Sample]) -> list[Sample]:
    """Return at most ``VALIDATION_CONVERSATIONS`` samples of each domain."""
    counts: dict[str, int] = {}
    kept = []
    for sample in samples:
        domain = sample.record.task
        if counts.get(domain, 0) < VALIDATION_CONVERSATIONS:
            counts[domain] = counts.get(domain, 0) + 1
            kept.append(sample)
    return kept
