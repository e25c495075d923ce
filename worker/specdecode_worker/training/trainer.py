"""The training loop: batches in, checkpoints, a history and a progress line out.

The forward and backward passes run on a copy of the head in ``dtype`` (bf16 is three times as fast where the processor
has it), the optimizer on fp32 masters. A checkpoint holds everything that the next step depends on, so a run that was
killed goes on as if it had not been.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.training.data import DataSet, batches
from specdecode_worker.training.errors import ResumeMismatch, TrainingError
from specdecode_worker.training.objective import loss_of
from specdecode_worker.training.replay import Tally, ranks
from specdecode_worker.training.shards import Conversation
from specdecode_worker.training.unroll import make_batch

VALIDATION_CHAIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Defaults are those that made the shipped head. Training ends after ``steps``, or after ``minutes`` if 0."""

    steps: int = 0
    minutes: float = 65.0
    learning_rate: float = 1e-3
    output_rate: float = 0.1  # lm_head's share of it: its rows start as the target's, and rare tokens have few examples
    warmup: float = 0.02  # share of the run
    final_rate: float = 0.03  # of the learning rate, at the end of the cosine
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    batch_tokens: int = 1024
    depth: int = 3
    deepen_at: tuple[float, ...] = (0.25, 0.5)  # shares of the run at which depths 2 and 3 join: early steps are cheap
    decay: float = 0.8
    seed: int = 0
    validate_every: float = 240.0  # seconds of training; a checkpoint is written as often


@dataclass(slots=True)
class Progress:
    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch
    shards: int = 0  # in use in this epoch
    seconds: float = 0.0
    tokens: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """One run over one data set. ``output_VE`` is the target's output matrix; its dtype is what is trained in."""

    def __init__(self, head: Eagle3Head, output_VE: Tensor, data: DataSet, settings: TrainSettings) -> None:
        self.master, self.output_VE, self.data, self.settings = head, output_VE, data, settings
        self.head = copy.deepcopy(head).to(output_VE.dtype).requires_grad_(True)
        self.master.requires_grad_(True)
        output = self.master.lm_head.weight
        inner = [parameter for parameter in self.master.parameters() if parameter is not output]
        self.optimizer = torch.optim.AdamW(
            [{"params": inner, "share": 1.0}, {"params": [output], "share": settings.output_rate}],
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.progress = Progress()

    @property
    def share_done(self) -> float:
        limits = self.settings
        return self.progress.step / limits.steps if limits.steps else self.progress.seconds / (60 * limits.minutes)

    @property
    def depth(self) -> int:
        """How deep this step unrolls."""
        return min(self.settings.depth, 1 + sum(self.share_done >= share for share in self.settings.deepen_at))

    def run(self, folder: Path, tell: Callable[[str], None], keep: Callable[[Eagle3Head], None]) -> None:
        """Trains to the end. Every few minutes: validation, a checkpoint in ``folder``, the head to ``keep``."""
        shown = due = self.progress.seconds
        due += self.settings.validate_every
        losses: list[float] = []
        if self.share_done >= 1:
            return
        for batch in self._batches():
            losses.append(self.step(batch))
            if self.progress.seconds >= shown + 15:
                tell(self._line(losses))
                shown, losses = self.progress.seconds, losses[-20:]
            if self.progress.seconds >= due or self.share_done >= 1:
                due = self.progress.seconds + self.settings.validate_every
                tell(self.validate(sum(losses) / len(losses)))
                self.save(folder)
                keep(self.master)
            if self.share_done >= 1:
                return

    def _batches(self) -> Iterator[list[Conversation]]:
        size, seed = self.settings.batch_tokens, self.settings.seed
        while True:
            if self.progress.batch == 0:
                self.progress.shards = self.data.grow()
            if not self.data.training:
                raise TrainingError(f"{self.data.folder} holds no conversation to train on; record more tokens")
            epoch = batches(self.data.training, tokens=size, seed=seed, epoch=self.progress.epoch)
            while self.progress.batch < len(epoch):
                self.progress.batch += 1
                yield epoch[self.progress.batch - 1]
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def step(self, conversations: list[Conversation]) -> float:
        """One optimizer step; returns the loss."""
        started = time.monotonic()
        batch = make_batch(conversations, self.output_VE.dtype)
        loss = loss_of(self.head, batch, self.output_VE, depth=self.depth, decay=self.settings.decay)
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * group["share"] * rate_at(self.share_done, self.settings)
        for mine, worked in zip(self.master.parameters(), self.head.parameters(), strict=True):
            assert worked.grad is not None
            mine.grad, worked.grad = worked.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.master.parameters(), self.settings.clip)
        self.optimizer.step()
        self._refresh()
        self.progress.step += 1
        self.progress.tokens += int(batch.valid_BA.sum())
        self.progress.seconds += time.monotonic() - started
        return float(loss.detach())

    @torch.no_grad()
    def _refresh(self) -> None:
        for mine, worked in zip(self.master.parameters(), self.head.parameters(), strict=True):
            worked.copy_(mine)

    def validate(self, loss: float) -> str:
        """Adds a line to the history: acceptance by depth and tokens per step of a chain, on the validation texts."""
        tally = Tally()
        texts = sorted(self.data.validation, key=lambda c: len(c.tokens_N))
        for start in range(0, len(texts), 8):
            for found in ranks(self.head, texts[start : start + 8], self.output_VE, VALIDATION_CHAIN):
                tally.walk(found, TreeShape.chain(VALIDATION_CHAIN))
        at = self.progress
        self.progress.history.append(
            {
                "step": at.step,
                "epoch": at.epoch,
                "minutes": round(at.seconds / 60, 2),
                "tokens": at.tokens,
                "loss": round(loss, 4),
                "acceptance": [round(a, 4) for a in tally.acceptance],
                "tokens_per_step": round(tally.tokens_per_step, 4),
            }
        )
        return f"validation: {json.dumps(self.progress.history[-1])}"

    def _line(self, losses: list[float]) -> str:
        at, share = self.progress, max(self.share_done, 1e-6)
        left = at.seconds / share * (1 - share) / 60
        return (
            f"train: step {at.step}, epoch {at.epoch}, loss {sum(losses) / len(losses):.3f}, "
            f"{at.tokens / at.seconds:.0f} tokens/s, {left:.1f} min left"
        )

    def save(self, folder: Path) -> None:
        partial = folder / "checkpoint.partial"
        state = {
            "settings": asdict(self.settings),
            "progress": asdict(self.progress),
            "head": self.master.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, partial)
        os.rename(partial, folder / "checkpoint.pt")

    def restore(self, folder: Path) -> bool:
        """Goes on from the checkpoint in ``folder`` if there is one. Raises ResumeMismatch if it is of another run."""
        path = folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        changed = [name for name, value in asdict(self.settings).items() if state["settings"][name] != value]
        if changed:
            raise ResumeMismatch(
                f"{path} was made with other settings ({', '.join(changed)}); name another --out or repeat those"
            )
        self.master.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        if self.data.grow(self.progress.shards) != self.progress.shards:
            raise ResumeMismatch(f"{path} has seen {self.progress.shards} shards, {self.data.folder} holds fewer")
        self._refresh()
        self.head.d2t.copy_(self.master.d2t)
        return True


def rate_at(share: float, settings: TrainSettings) -> float:
    """The learning rate's factor: a linear start, then half a cosine down to ``final_rate``."""
    if share < settings.warmup:
        return (share + 1e-3) / (settings.warmup + 1e-3)
    along = min(1.0, (share - settings.warmup) / (1 - settings.warmup))
    return settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * along)) / 2
