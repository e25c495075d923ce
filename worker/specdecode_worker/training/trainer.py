"""The training loop: objective, schedule and checkpoints."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode_worker.files import replacing
from specdecode_worker.models.drafts import Draft
from specdecode_worker.training.acceptance import StepCounts, greedy_step_counts, groups_of
from specdecode_worker.training.conversations import Conversation, DataSet, batches, pieces
from specdecode_worker.training.errors import ResumeMismatch, TrainingError
from specdecode_worker.training.prompts import TEMPERATURES
from specdecode_worker.training.unroll import (
    RootShare,
    TrainingBatch,
    all_roots,
    batch_for,
    logits_of,
    max_depth,
    root_count,
    root_share,
    shifted_back,
    unrolled,
    vocabulary_of,
    working_copy,
)

# Cross entropy and overlap of a draft's and the target's distribution, with gradients computed in the forward pass.
#
# Over a vocabulary of thousands both operations are bound by memory bandwidth. Autograd's own versions read and write
# the whole matrix about a dozen times. Shape suffixes: R rows (slots), V draft vocabulary.

# Rows of logits processed at once: [256, 8192] in fp32 (8 MiB) stays in the processor's cache.
_OVERLAP_ROWS = 256


class _Differentiated(torch.autograd.Function):
    """Result of a function of logits, whose gradient by each row of logits was computed with it."""

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, result: Tensor, gradient_RV: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_RV)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient_RV,) = ctx.saved_tensors
        outer = grad_outputs[0]  # of a sum over all rows, or of each row
        return gradient_RV.mul_(outer[:, None] if outer.dim() else outer), None, None


def soft_cross_entropy(logits_RV: Tensor, target_RV: Tensor, weight_R: Tensor) -> Tensor:
    """Return the weighted sum over rows of the cross entropy of softmax(``logits_RV``), a scalar.

    ``target_RV`` are probabilities. They sum to less than one in a row where the draft vocabulary lacks some tokens.
    """
    gradient_RV = torch.empty_like(logits_RV)
    loss = torch.zeros((), device=logits_RV.device)
    with torch.no_grad():
        for start in range(0, len(logits_RV), _OVERLAP_ROWS):
            here = slice(start, start + _OVERLAP_ROWS)
            log_p = torch.log_softmax(logits_RV[here], dim=-1, dtype=torch.float32)
            target, weight = target_RV[here].float(), weight_R[here]
            loss -= torch.linalg.vecdot(log_p, target) @ weight
            known_R1 = target.sum(dim=-1, keepdim=True)
            gradient_RV[here] = log_p.exp_().mul_(known_R1).sub_(target).mul_(weight[:, None])
    differentiated: Tensor = _Differentiated.apply(logits_RV, loss, gradient_RV)
    return differentiated


def overlap(logits_RV: Tensor, target_RV: Tensor, temperature: float) -> Tensor:
    """Return the sum over v of min(p, q) with q = softmax(logits / temperature), [R].

    This is the probability that an optimal coupling of draft and target draws the same token.
    """
    gradient_RV = torch.empty_like(logits_RV)
    overlap_R = torch.empty(len(logits_RV), device=logits_RV.device)
    with torch.no_grad():
        for start in range(0, len(logits_RV), _OVERLAP_ROWS):
            here = slice(start, start + _OVERLAP_ROWS)
            q = torch.softmax(logits_RV[here].float() / temperature, dim=-1)
            target = target_RV[here].float()
            wanting = q * (q < target)  # draft probability of the tokens where raising it raises the overlap
            overlap_R[here] = torch.minimum(q, target).sum(dim=-1)
            gradient_RV[here] = wanting.sub_(q.mul_(wanting.sum(dim=-1, keepdim=True))).div_(temperature)
    differentiated: Tensor = _Differentiated.apply(logits_RV, overlap_R, gradient_RV)
    return differentiated


# The training loss: divergence from the target's distribution, then expected tokens per step.
#
# Training starts with the divergence from the target's distribution at every unrolled depth. Deeper depths weigh less,
# because they are reached only where the drafts before them were accepted. It ends with the quantity that coupled
# sampling rewards. With S_k = sum of min(p, q) at depth k, the highest probability with which target and draft can
# agree there, the expected tokens per step from a root are 1 + S_1 + S_1 S_2 + ..., and the loss is -log of them. p and
# q are taken at a temperature of the served mix.
#
# Shape suffixes: R rows (valid slots), V draft vocabulary, B texts, A answer slots, E hidden size, T temperatures.

_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Parameters of the loss of one training step.

    ``divergence`` is the weight of the divergence term, 0 to 1. The acceptance term gets the rest. ``decay`` is the
    factor by which the divergence weight of each depth falls from the depth before.
    """

    depth: int
    decay: float
    divergence: float = 1.0
    temperature: float = 1.0
    """Temperature of the acceptance term; one of ``prompts.TEMPERATURES``."""
    sample_seed: int | None = None
    """Seed of the roots that are trained at deeper depths, see `root_order`. None trains all roots."""


def root_counts(conversations: Sequence[Conversation], depth: int, share: RootShare = all_roots) -> list[int]:
    """Return for each depth k the number of roots in ``conversations`` that are trained at that depth.

    A root needs an answer slot k slots after it.
    """
    lengths = [len(c.tokens_N) - c.answer_start for c in conversations]
    return [sum(root_count(length, k, share) for length in lengths) for k in range(depth)]


@torch.no_grad()
def target_distribution(
    final_RE: Tensor,
    output_VE: Tensor,
    vocabulary: Tensor,
    *,
    temperature: float = 1.0,
    normaliser_R: Tensor | None = None,
) -> Tensor:
    """Return the target's probabilities over the draft vocabulary, [R, V], in the dtype of ``final_RE``.

    Args:
        final_RE: Hidden states of the target after its final norm.
        output_VE: Output matrix of the target over its whole vocabulary.
        vocabulary: Target ids of the draft vocabulary.
        temperature: Temperature of the softmax.
        normaliser_R: Log of the sum of exp(logit / temperature) over the target's whole vocabulary. With it, the
            probabilities are those of the whole vocabulary and sum to less than one. Without it, they are renormalized
            over the draft vocabulary.
    """
    output_VE = output_VE[vocabulary]
    normalisers = torch.split(normaliser_R, _ROWS) if normaliser_R is not None else None
    parts = []
    for i, x in enumerate(torch.split(final_RE, _ROWS)):
        logits = (x @ output_VE.T).float().div_(temperature)
        known = logits.sub_(normalisers[i][:, None]).exp_() if normalisers else torch.softmax(logits, dim=-1)
        parts.append(known.to(x.dtype))
    return torch.cat(parts)


Unrolls = Sequence[tuple[Tensor, Tensor]]
"""Logits [R, V] of the trained slots of each depth, and their mask [B, A]."""


def loss_of(
    draft: Draft, batch: TrainingBatch, output_VE: Tensor, aim: LossSettings, counts: Sequence[int] | None = None
) -> Tensor:
    """Return the scalar loss of one batch, averaged over ``counts``.

    Args:
        draft: Draft in training.
        batch: Recorded texts, see ``make_batch``.
        output_VE: Output matrix of the target.
        aim: Parameters of the loss.
        counts: ``root_counts`` of all batches of the optimizer step, so that the losses of its batches add up to the
            mean of the step. Default: the counts of this batch.
    """
    unrolls = [
        (logits_of(draft, state_BAE[rooted_BA], k), rooted_BA)
        for k, (state_BAE, rooted_BA) in enumerate(unrolled(draft, batch, aim.depth, aim.sample_seed))
    ]
    counts = counts or [max(1, int(rooted_BA.sum())) for _, rooted_BA in unrolls]
    vocabulary = vocabulary_of(draft, len(output_VE))
    total = torch.zeros((), device=output_VE.device)
    if aim.divergence > 0:
        target_RV = _target(batch, output_VE, vocabulary, 1.0)
        total = total + aim.divergence * _divergence(unrolls, target_RV, batch.valid_BA, aim, counts)
    if aim.divergence < 1:
        target_RV = _target(batch, output_VE, vocabulary, aim.temperature)
        total = total + (1 - aim.divergence) * _acceptance(unrolls, target_RV, batch.valid_BA, aim, counts)
    return total


def _target(batch: TrainingBatch, output_VE: Tensor, vocabulary: Tensor, temperature: float) -> Tensor:
    """Return the target's probabilities at the valid slots of ``batch``, [R, V]."""
    normaliser_R = None
    if batch.normalisers_BAT is not None:
        normaliser_R = batch.normalisers_BAT[:, :, TEMPERATURES.index(temperature)][batch.valid_BA]
    final_RE = batch.final_BAE[batch.valid_BA]
    return target_distribution(final_RE, output_VE, vocabulary, temperature=temperature, normaliser_R=normaliser_R)


def _divergence(
    unrolls: Unrolls, target_RV: Tensor, valid_BA: Tensor, aim: LossSettings, counts: Sequence[int]
) -> Tensor:
    """Return the cross entropy per answer token, averaged over the depths with weights that sum to one."""
    weights = [aim.decay**k for k in range(aim.depth)]
    total = torch.zeros((), device=target_RV.device)
    for k, (logits_RV, rooted_BA) in enumerate(unrolls):
        weight_R = torch.full((len(logits_RV),), weights[k] / sum(weights) / max(1, counts[k]), device=total.device)
        total = total + soft_cross_entropy(logits_RV, target_RV[rooted_BA[valid_BA]], weight_R)
    return total


def _acceptance(
    unrolls: Unrolls, target_RV: Tensor, valid_BA: Tensor, aim: LossSettings, counts: Sequence[int]
) -> Tensor:
    """Return -log of the expected tokens per step, averaged over the roots."""
    path_BA = torch.ones(valid_BA.shape, device=valid_BA.device)
    expected_BA = torch.ones_like(path_BA)
    for k, (logits_RV, rooted_BA) in enumerate(unrolls):
        own_RV = target_RV[rooted_BA[valid_BA]]
        overlap_BA = torch.zeros_like(path_BA).masked_scatter(rooted_BA, overlap(logits_RV, own_RV, aim.temperature))
        # Depth k of root i was computed at slot i + k. Beyond the end of the text, and where the root was dropped,
        # every draft counts as rejected.
        path_BA = path_BA * shifted_back(overlap_BA, k)
        expected_BA = expected_BA + path_BA
    return -expected_BA.log()[valid_BA].sum() / max(1, counts[0])


# Settings of a training run and the schedules of learning rate, depth and loss derived from them.
#
# A schedule is a function of the completed share of the run, 0 to 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of a training run. Training ends after ``steps`` or ``minutes``, whichever comes first; 0 is no limit.

    The defaults are those that produced the shipped head.
    """

    steps: int = 0
    minutes: float = 0.0
    learning_rate: float = 1e-3
    # Learning rate of lm_head relative to the rest: its rows start as the target's, and rare tokens have few examples.
    output_rate: float = 0.1
    warmup: float = 0.02  # share of the run
    final_rate: float = 0.03  # learning rate at the end of the cosine, relative to learning_rate
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    batch_tokens: int = 1024
    accumulate: int = 1  # batches per optimizer step
    depth: int = 7
    # Shares of the run at which one more depth is unrolled: shallow steps are cheaper.
    deepen_at: tuple[float, ...] = (0.05, 0.15, 0.3, 0.45, 0.55, 0.65)
    decay: float = 0.8
    divergence_until: float = 0.1  # share of the run up to which the loss is the divergence alone
    acceptance_from: float = 0.3  # share of the run from which the divergence weight is divergence_floor
    divergence_floor: float = 0.4  # weight of the divergence at the end; acceptance has the rest
    # Temperatures of the served mix and their shares; 0.3 represents greedy requests (see ``prompts.TEMPERATURES``).
    mix: tuple[tuple[float, float], ...] = ((0.3, 0.5), (0.6, 0.15), (0.8, 0.25), (1.0, 0.1))
    seed: int = 0
    validate_every: float = 240.0  # seconds of training between validations, each followed by a checkpoint
    # Steps between validations instead of seconds, if not 0: the choice of the best draft then depends on no clock.
    validate_steps: int = 0


def learning_rate_factor(share: float, settings: TrainSettings) -> float:
    """Return the learning rate factor: a linear warmup, then half a cosine down to ``final_rate``."""
    if share < settings.warmup:
        return (share + 1e-3) / (settings.warmup + 1e-3)
    along = min(1.0, (share - settings.warmup) / (1 - settings.warmup))
    return settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * along)) / 2


def depth_at(share: float, settings: TrainSettings) -> int:
    """Return the number of depths to unroll at this share of the run."""
    return min(settings.depth, 1 + sum(share >= start for start in settings.deepen_at))


def loss_settings_at(share: float, step: int, settings: TrainSettings) -> LossSettings:
    """Return the loss parameters of ``step``.

    The temperature is drawn from the mix by a generator seeded with (seed, step), so a repeated step gets the same one,
    and trains the same roots.
    """
    temperatures, shares = zip(*settings.mix, strict=True)
    drawn = random.Random(f"{settings.seed}/{step}").choices(temperatures, shares)[0]
    blend = max(1e-9, settings.acceptance_from - settings.divergence_until)
    along = min(1.0, max(0.0, (share - settings.divergence_until) / blend))
    divergence = 1 - along * (1 - settings.divergence_floor)
    return LossSettings(
        depth=depth_at(share, settings),
        decay=settings.decay,
        divergence=divergence,
        temperature=drawn,
        sample_seed=settings.seed * 1_000_003 + step,
    )


@dataclass(slots=True)
class TrainingProgress:
    """Counters and validation history of a training run, as the checkpoint stores them."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # next batch of the epoch
    shards: int = 0  # number of shards in use in this epoch
    seconds: float = 0.0
    tokens: int = 0
    most: float = 0.0  # best validation so far, tokens per step
    is_best: bool = True  # whether the latest validation is the best one
    history: list[dict[str, Any]] = field(default_factory=list)


# Validation during training: acceptance by depth and domain, and divergence, on held-out conversations.

CHAIN = 3
_PIECE = 2048
"""Most answer tokens whose divergence is computed at once."""


@torch.inference_mode()
def validation_line(draft: Draft, conversations: Sequence[Conversation], output_VE: Tensor) -> dict[str, Any]:
    """Return the validation results of a draft as an entry of the history.

    Tokens per step and acceptance are those of a chain of depth 3 in greedy replay, overall and by domain.
    ``divergence`` is the cross entropy at the first depth, in nats per token.
    """
    depth = max_depth(draft, CHAIN)
    domains = greedy_step_counts(draft, conversations, output_VE, depth)
    overall = StepCounts.total(domains.values())
    divergence = 0.0
    slots = root_counts(conversations, 1)
    for part in groups_of(conversations):
        for group in groups_of([piece for conversation in part for piece in pieces(conversation, _PIECE)]):
            batch = batch_for(draft, group, output_VE.dtype)
            divergence += float(loss_of(draft, batch, output_VE, LossSettings(depth=1, decay=1.0), slots))
    return {
        "divergence": round(divergence, 4),
        "acceptance": _rounded(overall.acceptance),
        "tokens_per_step": round(overall.tokens_per_step, 4),
        "domains": {
            name: {"tokens_per_step": round(counts.tokens_per_step, 4), "acceptance": _rounded(counts.acceptance)}
            for name, counts in domains.items()
        },
    }


def _rounded(shares: Sequence[float]) -> list[float]:
    return [round(share, 4) for share in shares]


# The training loop: optimizer steps, validation, checkpoints and progress lines.
#
# The forward and backward passes run on a copy of the draft in the dtype of the target's output matrix (bf16 is three
# times as fast where the processor supports it). Gradients are accumulated in fp32 and the optimizer updates fp32
# master weights. A checkpoint holds everything that the next step depends on, so a killed run resumes with the same
# result.

_LONGEST_STEP, _FEW_STEPS = 10, 20
"""Longest time counted for a step, in mean step times, and the number of steps from which the mean is used."""

Batches = list[list[Conversation]]
"""Batches of one optimizer step."""


class Trainer:
    """One training run over one data set.

    ``output_VE`` is the target's output matrix. Its dtype is the dtype of the forward and backward passes.
    """

    def __init__(self, head: Draft, output_VE: Tensor, data: DataSet, settings: TrainSettings) -> None:
        self.master, self.output_VE, self.data, self.settings = head, output_VE, data, settings
        self.head = working_copy(head, output_VE.dtype)
        self.master.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            _groups(self.master, settings),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.progress = TrainingProgress()
        self.best: dict[str, Tensor] = {}  # master weights at the best validation so far

    @property
    def share_done(self) -> float:
        """Completed share of the run, by steps or by time; 1 or more means complete."""
        limits = self.settings
        by_steps = self.progress.step / limits.steps if limits.steps else 0.0
        by_time = self.progress.seconds / (60 * limits.minutes) if limits.minutes else 0.0
        return max(by_steps, by_time)

    @property
    def depth(self) -> int:
        """Number of depths that the current step unrolls."""
        return max_depth(self.head, depth_at(self.share_done, self.settings))

    def run(self, folder: Path, log: Callable[[str], None], save_draft: Callable[[Draft], None]) -> None:
        """Train until the run is over, then load the best weights into ``master``.

        Every ``validate_every`` seconds (or ``validate_steps`` steps): validate, pass the draft to ``save_draft`` if it
        is the best so far, and write a checkpoint.

        Args:
            folder: Folder of the checkpoint.
            log: Receives progress lines.
            save_draft: Saves the draft.
        """
        shown = due = self.progress.seconds
        due += self.settings.validate_every
        losses: list[float] = []
        for group in self._batches() if self.share_done < 1 else ():
            losses.append(self.step(group))
            if self.progress.seconds >= shown + 15:
                log(f"train: {self.progress_line(losses)}")
                shown, losses = self.progress.seconds, losses[-20:]
            if self._due(due):
                due = self.progress.seconds + self.settings.validate_every
                self._validate_and_save(folder, losses, log, save_draft)
            if self.share_done >= 1:
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
        if self.progress.is_best:
            self.best = {name: tensor.clone() for name, tensor in self.master.state_dict().items()}
            save_draft(self.master)  # before the checkpoint, so that a kill in between loses no draft
        self.save(folder)

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
        loss_settings = replace(loss_settings_at(share, self.progress.step, self.settings), depth=self.depth)
        conversations = [conversation for batch in group for conversation in batch]
        counts = root_counts(conversations, loss_settings.depth, root_share(self.head))
        loss = self._add_gradients(group, loss_settings, counts)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = (
                self.settings.learning_rate * parameters["share"] * learning_rate_factor(share, self.settings)
            )
        torch.nn.utils.clip_grad_norm_(self.master.parameters(), self.settings.clip)
        self.optimizer.step()
        self._sync_working_copy()
        self.progress.seconds += self._capped_step_seconds(time.monotonic() - started)
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
        """Sum the gradients of all batches, in fp32 on the master weights, and return the loss."""
        pairs = list(zip(self.master.parameters(), self.head.parameters(), strict=True))
        for master, _ in pairs:
            master.grad = torch.zeros_like(master)
        total = torch.zeros((), device=self.output_VE.device)
        for conversations in group:
            batch = batch_for(self.head, conversations, self.output_VE.dtype)
            loss = loss_of(self.head, batch, self.output_VE, loss_settings, counts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            for master, working in pairs:
                if working.grad is not None:  # Medusa heads beyond the current depth have no gradient
                    assert master.grad is not None
                    master.grad += working.grad
                    working.grad = None
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
        at.is_best = tokens_per_step >= at.most
        at.most = max(at.most, tokens_per_step)
        at.history.append(line)
        return f"validation: {json.dumps(line)}"

    def progress_line(self, losses: Sequence[float]) -> str:
        """Return the progress of the run with the mean of the recent ``losses``."""
        at, share = self.progress, max(self.share_done, 1e-6)
        left = at.seconds / share * (1 - share) / 60
        return (
            f"step {at.step}, epoch {at.epoch}, depth {self.depth}, loss {sum(losses) / len(losses):.3f}, "
            f"{at.tokens / max(at.seconds, 1e-6):.0f} tokens/s, at most {left:.1f} min left"
        )

    def save(self, folder: Path) -> None:
        """Write a checkpoint to ``folder``/checkpoint.pt."""
        state = {
            "settings": asdict(self.settings),
            "progress": asdict(self.progress),
            "head": self.master.state_dict(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
        }
        with replacing(folder / "checkpoint.pt") as partial:
            torch.save(state, partial)

    def restore(self, folder: Path) -> bool:
        """Load the checkpoint in ``folder`` and return whether there was one.

        Raises:
            ResumeMismatch: The checkpoint was made with other settings or with more shards than the data folder holds.
        """
        path = folder / "checkpoint.pt"
        if not path.exists():
            return False
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        changed = [name for name, value in asdict(self.settings).items() if state["settings"].get(name) != value]
        if changed:
            raise ResumeMismatch(
                f"{path} was made with other settings ({', '.join(changed)}); name another --out or repeat those"
            )
        self.master.load_state_dict(state["head"])
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = TrainingProgress(**state["progress"])
        if self.data.grow(self.progress.shards) != self.progress.shards:
            raise ResumeMismatch(f"{folder} has seen {self.progress.shards} shards, {self.data.folder} holds fewer")
        self.head.load_state_dict(self.master.state_dict())
        return True


def _groups(draft: Draft, settings: TrainSettings) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: output matrices with ``output_rate``, all other parameters with rate 1.

    A draft model's output matrix counts as such even where it is also its embedding.
    """
    output = [p for name, p in draft.named_parameters() if name.startswith(("lm_head", "lm_heads."))]
    inner = [p for p in draft.parameters() if all(p is not o for o in output)]
    groups = [{"params": inner, "share": 1.0}, {"params": output, "share": settings.output_rate}]
    return [group for group in groups if group["params"]]
