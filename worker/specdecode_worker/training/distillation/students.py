"""Training of the student draft: rounds of optimizer steps with validation after each, in one checkpoint."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import Draft
from specdecode_worker.training.acceptance import StepCounts, greedy_step_counts
from specdecode_worker.training.artifacts import write_draft
from specdecode_worker.training.conversations import Conversation, DataSet, batches
from specdecode_worker.training.distillation.pool import (
    RoundResult,
    Weighted,
    best_of,
    compose,
    has_stalled,
    replay_share,
)
from specdecode_worker.training.distillation.records import Interrupted, Stopped
from specdecode_worker.training.evaluation import CalibratedDraft, Sample, count_steps
from specdecode_worker.training.trainer import Trainer, TrainSettings

_PROGRESS_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentSettings:
    """Settings of a distillation. Training ends after ``steps`` or ``minutes``, or when validation has stalled."""

    steps: int = 2000
    minutes: float = 60.0
    learning_rate: float = 2e-4
    batch_tokens: int = 1024
    round_steps: int = 50
    """Optimizer steps between two validations."""
    patience: int = 3
    """Rounds without progress after which training stops."""
    replay_share: float = 0.5
    depth: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StudentData:
    """Texts for training and validation. ``weights`` are the shares of the traffic by captured domain."""

    captured: Sequence[Weighted]
    replay: Sequence[Conversation]
    validation: Sequence[Sample]
    old_validation: Sequence[Conversation]
    weights: Mapping[str, float]


class StudentTraining:
    """Training of one draft over rounds. All files go to ``out``; the best draft so far is in out/best."""

    def __init__(
        self, head: Draft, target: CausalLM, data: StudentData, settings: StudentSettings, out: Path, *,
        target_folder: Path,
    ) -> None:  # fmt: skip
        self.settings, self._data, self._out, self._target_folder = settings, data, out, target_folder
        self._target = target.config
        self._trainer = Trainer(
            head, target.lm_head.weight, DataSet(out / "unused", validation=0), train_settings(settings)
        )
        self._next_line_seconds = 0.0

    @property
    def round_results(self) -> list[RoundResult]:
        """Validation results so far, as the checkpoint stores them."""
        return [RoundResult(one["step"], one["captured"], one["old"], one["old_mean"]) for one in self.history]

    @property
    def history(self) -> list[dict[str, Any]]:
        """Entries of all validations so far."""
        return self._trainer.progress.history

    @property
    def best(self) -> int:
        """Index of the best validation so far, see `best_of`."""
        return best_of(self.round_results, self._data.weights)

    @property
    def is_over(self) -> bool:
        """True when the limits are reached or validation has stalled."""
        stalled = has_stalled(self.round_results, self._data.weights, self.settings.patience)
        return bool(self.history) and (stalled or self._trainer.share_done >= 1)

    def run(self, log: Callable[[str], None], stopped: Stopped) -> None:
        """Train to the end, from the checkpoint of an earlier run if there is one.

        Raises:
            Interrupted: ``stopped`` returned True; a checkpoint is written.
            ResumeMismatch: The checkpoint was made with other settings.
        """
        if self._trainer.restore(self._out):
            log(f"distill: going on from step {self._trainer.progress.step}")
        if not self.history:
            self._validate_and_save(0.0, log)
        while not self.is_over:
            self._validate_and_save(self._round(log, stopped), log)

    def _round(self, log: Callable[[str], None], stopped: Stopped) -> float:
        """Train one round, or the rest of an interrupted one, and return the mean loss."""
        settings, at = self.settings, self._trainer.progress
        texts = compose(
            self._data.captured, self._data.replay, share=self.share, seed=settings.seed, number=at.epoch,
            tokens=settings.round_steps * settings.batch_tokens,
        )  # fmt: skip
        groups = batches(texts, tokens=settings.batch_tokens, seed=settings.seed, epoch=at.epoch)
        losses = [0.0]
        while at.batch < len(groups) and self._trainer.share_done < 1:
            if stopped():
                self._trainer.save(self._out)
                raise Interrupted
            losses.append(self._trainer.step([groups[at.batch]]))
            at.batch += 1
            if time.monotonic() >= self._next_line_seconds:
                self._next_line_seconds = time.monotonic() + _PROGRESS_SECONDS
                log(f"distill: {self._trainer.progress_line(losses[-1:])}")
        at.epoch, at.batch = at.epoch + 1, 0
        return sum(losses) / max(len(losses) - 1, 1)

    @property
    def share(self) -> float:
        """Share of replayed tokens in the current or next round."""
        return replay_share(self.round_results, self.settings.replay_share)

    def _validate_and_save(self, loss: float, log: Callable[[str], None]) -> None:
        """Validate, save the draft if it is the best, and write the checkpoint."""
        at = self._trainer.progress
        head, depth = self._trainer.head, self.settings.depth
        old = greedy_step_counts(head, self._data.old_validation, self._trainer.output_VE, depth)
        at.history.append(
            {
                "step": at.step,
                "minutes": round(at.seconds / 60, 2),
                "loss": round(loss, 4),
                "replay_share": round(self.share, 3) if at.history else 0.0,
                "captured": self._captured_tokens_per_step(),
                "old": _tokens_per_step(old),
                "old_mean": round(StepCounts.total(old.values()).tokens_per_step, 4) if old else 1.0,
            }
        )
        if self.best == len(at.history) - 1:
            write_draft(self._trainer.master, self._out / "best", self._target_folder)
        self._trainer.save(self._out)
        log(f"distill: validation {at.history[-1]}")

    def _captured_tokens_per_step(self) -> dict[str, float]:
        """Return the tokens per step of the trained chain by captured domain."""
        by_domain: dict[str, list[StepCounts]] = defaultdict(list)
        draft, shape = CalibratedDraft(self._trainer.head), TreeShape.chain(self.settings.depth)
        for sample in self._data.validation:
            by_domain[sample.record.task] += count_steps([draft], sample, shape, self._target)
        return _tokens_per_step({name: StepCounts.total(counts) for name, counts in sorted(by_domain.items())})


def _tokens_per_step(counts_by_domain: Mapping[str, StepCounts]) -> dict[str, float]:
    return {domain: round(counts.tokens_per_step, 4) for domain, counts in counts_by_domain.items()}


def train_settings(settings: StudentSettings) -> TrainSettings:
    """Return the settings of the ``Trainer``."""
    return TrainSettings(
        steps=settings.steps,
        minutes=settings.minutes,
        learning_rate=settings.learning_rate,
        batch_tokens=settings.batch_tokens,
        depth=settings.depth,
        # The head can draft at every depth already. With fewer depths at first it would forget the deeper ones.
        deepen_at=(0.0,) * (settings.depth - 1),
        seed=settings.seed,
    )
