"""The training loop: optimizer steps, validation, checkpoints and progress lines.

The forward and backward passes run on a copy of the draft in the dtype of the target's output matrix (bf16 is three
times as fast where the processor supports it). Gradients are accumulated in fp32 and the optimizer updates fp32 master
weights. A checkpoint holds everything that the next step depends on, so a killed run resumes with the same result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.training.data.batches import DataSet, batches
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.errors import ResumeMismatch, TrainingError
from specdecode_worker.training.heads.root_sampling import all_roots
from specdecode_worker.training.heads.trainable_drafts import batch_for, max_depth, root_share, working_copy
from specdecode_worker.training.optimization import checkpoint
from specdecode_worker.training.optimization.checkpoint import Progress
from specdecode_worker.training.optimization.data_parallel import ProcessGroup
from specdecode_worker.training.optimization.objective import LossSettings, loss_of, root_counts
from specdecode_worker.training.optimization.schedule import (
    TrainSettings,
    depth_at,
    learning_rate_factor,
    loss_settings_at,
)
from specdecode_worker.training.optimization.validation import validation_line

__all__ = ["Progress", "TrainSettings", "Trainer", "learning_rate_factor"]

_LONGEST_STEP, _FEW_STEPS = 10, 20
"""Longest time counted for a step, in mean step times, and the number of steps from which the mean is used."""

Batches = list[list[Conversation]]
"""Batches of one optimizer step."""


class Trainer:
    """One training run over one data set.

    ``output_VE`` is the target's output matrix. Its dtype is the dtype of the forward and backward passes.
    """

    def __init__(
        self, head: Draft, output_VE: Tensor, data: DataSet, settings: TrainSettings, peers: ProcessGroup | None = None
    ) -> None:
        self.master, self.output_VE, self.data, self.settings = head, output_VE, data, settings
        self.peers = peers or ProcessGroup()
        self.head = working_copy(head, output_VE.dtype)
        self.master.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            _groups(self.master, settings),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}  # master weights at the best validation so far

    @property
    def share_done(self) -> float:
        """Completed share of the run, by steps or by time; 1 or more means complete."""
        limits = self.settings
        return self.progress.step / limits.steps if limits.steps else self.progress.seconds / (60 * limits.minutes)

    @property
    def depth(self) -> int:
        """Number of depths that the current step unrolls."""
        return max_depth(self.head, depth_at(self.share_done, self.settings))

    @property
    def is_over(self) -> bool:
        """True when the run is complete or validation has been below its best ``patience`` times in a row."""
        patience = self.settings.patience
        return self.share_done >= 1 or 0 < patience <= self.progress.worse

    def run(self, folder: Path, log: Callable[[str], None], save_draft: Callable[[Draft], None]) -> None:
        """Train until the run is over, then load the best weights into ``master``.

        Every ``validate_every`` seconds (or ``validate_steps`` steps): validate, and on rank 0 pass the draft to
        ``save_draft`` if it is the best so far and write a checkpoint.

        Args:
            folder: Folder of the checkpoint.
            log: Receives progress lines.
            save_draft: Saves the draft.
        """
        shown = due = self.progress.seconds
        due += self.settings.validate_every
        losses: list[float] = []
        for group in self._batches() if not self.is_over else ():
            losses.append(self.step(group))
            if self.progress.seconds >= shown + 15:
                log(self._line(losses))
                shown, losses = self.progress.seconds, losses[-20:]
            if self._due(due):
                due = self.progress.seconds + self.settings.validate_every
                self._validate_and_save(folder, losses, log, save_draft)
            if self.is_over:
                break
        if self.best:
            self.master.load_state_dict(self.best)
            self._sync_working_copy()

    def _due(self, seconds: float) -> bool:
        """Return whether validation is due after this step."""
        every = self.settings.validate_steps
        interval_reached = self.progress.step % every == 0 if every else self.progress.seconds >= seconds
        return interval_reached or self.share_done >= 1

    def _validate_and_save(
        self, folder: Path, losses: list[float], log: Callable[[str], None], save_draft: Callable[[Draft], None]
    ) -> None:
        """Validate, save the draft if it is the best so far, and write a checkpoint."""
        log(self.validate(sum(losses) / len(losses)))
        if self.progress.worse == 0:
            self.best = {name: tensor.clone() for name, tensor in self.master.state_dict().items()}
        if self.peers.rank == 0:
            if self.progress.worse == 0:
                save_draft(self.master)  # before the checkpoint, so that a kill in between loses no draft
            self.save(folder)
        self.peers.wait()

    def _batches(self) -> Iterator[Batches]:
        """Yield the batches of each optimizer step, epoch after epoch, from the position in ``progress``."""
        size, seed, many = self.settings.batch_tokens, self.settings.seed, self.settings.accumulate
        while True:
            if self.progress.batch == 0:
                self.progress.shards = self.data.grow()
            if not self.data.training:
                raise TrainingError(f"{self.data.folder} holds no conversation to train on; record more tokens")
            epoch = batches(self.data.training, tokens=size, seed=seed, epoch=self.progress.epoch)
            while self.progress.batch < len(epoch):
                group = epoch[self.progress.batch : self.progress.batch + many]
                self.progress.batch += len(group)
                yield group
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def step(self, group: Batches) -> float:
        """Run one optimizer step on ``group`` and return its loss."""
        started = time.monotonic()
        share = self.share_done
        loss_settings = loss_settings_at(share, self.progress.step, self.settings)
        share_of_roots = root_share(self.head)
        loss_settings = LossSettings(
            depth=self.depth,
            decay=loss_settings.decay,
            divergence=loss_settings.divergence,
            temperature=loss_settings.temperature,
            sample_seed=_sample_seed(self.settings.seed, self.progress.step) if share_of_roots else None,
        )
        conversations = [conversation for batch in group for conversation in batch]
        counts = root_counts(conversations, loss_settings.depth, share_of_roots or all_roots)
        loss = self._add_gradients(group, loss_settings, counts)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = (
                self.settings.learning_rate * parameters["share"] * learning_rate_factor(share, self.settings)
            )
        torch.nn.utils.clip_grad_norm_(self.master.parameters(), self.settings.clip)
        self.optimizer.step()
        self._sync_working_copy()
        self.progress.seconds = self.peers.broadcast_seconds(
            self.progress.seconds + self._capped_step_seconds(time.monotonic() - started)
        )
        self.progress.step += 1
        self.progress.tokens += counts[0]
        return loss

    def _capped_step_seconds(self, seconds: float) -> float:
        """Return the seconds that a step adds to the run's training time.

        A step longer than 10 mean steps is counted as 10: the machine was suspended or stalled meanwhile.
        """
        at = self.progress
        return min(seconds, _LONGEST_STEP * at.seconds / at.step) if at.step >= _FEW_STEPS else seconds

    def _add_gradients(self, group: Batches, loss_settings: LossSettings, counts: list[int]) -> float:
        """Sum the gradients of all batches over all ranks, in fp32 on the master weights, and return the loss."""
        pairs = list(zip(self.master.parameters(), self.head.parameters(), strict=True))
        for master, _ in pairs:
            master.grad = torch.zeros_like(master)
        total = torch.zeros((), device=self.output_VE.device)
        for conversations in self.peers.take_rank_items(group):
            batch = batch_for(self.head, conversations, self.output_VE.dtype)
            loss = loss_of(self.head, batch, self.output_VE, loss_settings, counts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            for master, working in pairs:
                if working.grad is not None:  # Medusa heads beyond the current depth have no gradient
                    assert master.grad is not None
                    master.grad += working.grad
                    working.grad = None
        self.peers.add([master.grad for master, _ in pairs if master.grad is not None] + [total])
        return float(total)

    @torch.no_grad()
    def _sync_working_copy(self) -> None:
        """Copy the fp32 master weights to the working copy."""
        for master, working in zip(self.master.parameters(), self.head.parameters(), strict=True):
            working.copy_(master)

    def validate(self, loss: float) -> str:
        """Validate the draft, append the result to the history and return it as a progress line.

        Args:
            loss: Mean training loss since the last progress line.
        """
        at = self.progress
        line: dict[str, Any] = {
            "step": at.step,
            "epoch": at.epoch,
            "minutes": round(at.seconds / 60, 2),
            "tokens": at.tokens,
            "depth": self.depth,
            "loss": round(loss, 4),
            **validation_line(self.head, self.data.validation, self.output_VE),
        }
        tokens_per_step = line["tokens_per_step"]
        at.worse = at.worse + 1 if tokens_per_step < at.most else 0
        at.most = max(at.most, tokens_per_step)
        at.history.append(line)
        return f"validation: {json.dumps(line)}"

    def _line(self, losses: list[float]) -> str:
        """Return a progress line for the recent ``losses``."""
        at, share = self.progress, max(self.share_done, 1e-6)
        left = at.seconds / share * (1 - share) / 60
        return (
            f"train: step {at.step}, epoch {at.epoch}, depth {self.depth}, loss {sum(losses) / len(losses):.3f}, "
            f"{at.tokens / at.seconds:.0f} tokens/s, {left:.1f} min left"
        )

    def save(self, folder: Path) -> None:
        """Write a checkpoint to ``folder``."""
        state = {
            "settings": asdict(self.settings),
            "progress": asdict(self.progress),
            "head": self.master.state_dict(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
        }
        checkpoint.write(state, folder)

    def restore(self, folder: Path) -> bool:
        """Load the checkpoint in ``folder`` and return whether there was one.

        Raises:
            ResumeMismatch: The checkpoint was made with other settings or with more shards than the data folder holds.
        """
        state = checkpoint.read(folder, self.settings)
        if state is None:
            return False
        self.master.load_state_dict(state["head"])
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        if self.data.grow(self.progress.shards) != self.progress.shards:
            raise ResumeMismatch(f"{folder} has seen {self.progress.shards} shards, {self.data.folder} holds fewer")
        self.head.load_state_dict(self.master.state_dict())
        return True


def _sample_seed(seed: int, step: int) -> int:
    """Return the seed of the roots that one step trains: a resumed run trains the same ones."""
    return seed * 1_000_003 + step


def _groups(draft: Draft, settings: TrainSettings) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: output matrices with ``output_rate``, all other parameters with rate 1.

    A draft model's output matrix counts as such even where it is also its embedding.
    """
    output = [p for name, p in draft.named_parameters() if name.startswith(("lm_head", "lm_heads."))]
    inner = [p for p in draft.parameters() if all(p is not o for o in output)]
    groups = [{"params": inner, "share": 1.0}, {"params": output, "share": settings.output_rate}]
    return [group for group in groups if group["params"]]
