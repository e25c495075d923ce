"""Measure drafts: acceptance, calibration and time per token, and the verdict on a candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.capture import Record
from specdecode_worker.contract import TreeShape
from specdecode_worker.contract.distillation import GainBounds
from specdecode_worker.files import write_json
from specdecode_worker.models.causal_lm import Attend, CausalLM
from specdecode_worker.models.config import CausalLMConfig
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.drafts import Draft
from specdecode_worker.models.eagle import Eagle3Head, PEagleHead
from specdecode_worker.models.fetch import CALIBRATION_FILE
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.training.acceptance import RANKS, StepCounts, by_root, ranks_of
from specdecode_worker.training.conversations import Conversation, pieces
from specdecode_worker.training.replay import RecordPositions
from specdecode_worker.training.unroll import batch_for, logits_of, max_depth, unrolled, vocabulary_of

# Statistical comparison of two drafts: paired time per token, by domain and over the traffic's mix.
#
# All functions are pure except for seeded resampling. Both drafts were evaluated on the same texts, so a conversation
# gives a pair of step counts and a round of timing gives a pair of step times. Conversations are resampled within their
# domain and rounds of timing among themselves (Efron's percentile bootstrap), so the bounds include the uncertainty of
# both.
#
# Shape suffixes: C conversations, R rounds of timing, B the data followed by the resamples, D domains.

Floats = NDArray[np.float64]
Finding = Literal["better", "worse", "inconclusive"]
EXIT_CODES: Mapping[Finding, int] = {"better": 0, "worse": 2, "inconclusive": 3}
MIN_CONVERSATIONS = 64
"""Fewest conversations of a domain; with fewer the verdict is inconclusive."""
TOLERATED_LOSS = -0.02
"""Lowest gain that a single domain may have."""
_TAILS = (0.025, 0.975)
_RESAMPLES = 4000
_AT_ONCE = 250


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """Token and step counts of one domain by conversation (C).

    ``tokens_C`` counts the tokens after the first of each answer; ``deployed_C`` and ``candidate_C`` the steps that
    either draft takes for them. ``weight`` is the domain's share of the traffic's tokens, 0 for a golden domain.
    """

    name: str
    weight: float
    tokens_C: Floats
    deployed_C: Floats
    candidate_C: Floats


@dataclass(frozen=True, slots=True)
class PairedStepCosts:
    """Seconds per step with either draft, from rounds (R) that time both in turn."""

    deployed_R: Floats
    candidate_R: Floats


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the comparison with its reasons and gains. ``mix`` is the gain over the traffic's mix."""

    finding: Finding
    reasons: tuple[str, ...]
    mix: GainBounds | None
    domains: Mapping[str, GainBounds]

    @property
    def exit_code(self) -> int:
        """Exit code of the command for this finding."""
        return EXIT_CODES[self.finding]


def compute_verdict(domains: Sequence[Domain], costs: PairedStepCosts, *, wanted_gain: float) -> Verdict:
    """Compare the drafts and return the verdict.

    ``better``: the lower bound of the mix exceeds ``wanted_gain``, and the lower bound of every domain exceeds
    ``TOLERATED_LOSS``. ``worse``: the upper bound of a domain is below ``TOLERATED_LOSS``, or that of the mix is below
    zero. The bounds leave out 2.5 % on each side.
    """
    few = [f"{d.name}: {len(d.tokens_C)} conversations" for d in domains if len(d.tokens_C) < MIN_CONVERSATIONS]
    judged = [d for d in domains if len(d.tokens_C)]
    if not any(d.weight > 0 for d in judged):
        return Verdict("inconclusive", ("no captured conversation to judge by",), None, {})
    mix, gains = _gains(judged, costs)
    if few:
        reason = f"fewer than {MIN_CONVERSATIONS} conversations in a domain"
        return Verdict("inconclusive", (reason, *few), mix, gains)
    finding, reasons = _finding(mix, gains, wanted_gain)
    return Verdict(finding, reasons, mix, gains)


def _finding(mix: GainBounds, gains: Mapping[str, GainBounds], wanted: float) -> tuple[Finding, tuple[str, ...]]:
    """Return the finding for these gains and the reasons for it."""
    lost = [f"{name}: gain under {g.upper:+.1%}" for name, g in gains.items() if g.upper < TOLERATED_LOSS]
    lost += [f"mix: gain under {mix.upper:+.1%}"] if mix.upper < 0 else []
    if lost:
        return "worse", tuple(lost)
    doubts = [f"{name}: gain above {g.lower:+.1%} only" for name, g in gains.items() if not g.lower > TOLERATED_LOSS]
    doubts += [] if mix.lower > wanted else [f"mix: gain above {mix.lower:+.1%} only, {wanted:+.1%} is wanted"]
    return ("inconclusive", tuple(doubts)) if doubts else ("better", (f"mix: gain above {mix.lower:+.1%}",))


def _gains(domains: Sequence[Domain], costs: PairedStepCosts) -> tuple[GainBounds, dict[str, GainBounds]]:
    """Return the gain over the mix and the gain of each domain."""
    rng = np.random.default_rng(0)
    ratio_B = _cost_ratios(costs, rng)
    steps = [_steps_per_token(domain, rng) for domain in domains]  # each [2, 1 + resamples]
    gains = {d.name: _gain(ratio_B * each[0] / each[1] - 1) for d, each in zip(domains, steps, strict=True)}
    weight_D = np.array([d.weight for d in domains])
    mixed_2B = np.tensordot(weight_D, np.stack(steps), axes=1)
    return _gain(ratio_B * mixed_2B[0] / mixed_2B[1] - 1), gains


def _gain(drawn_B: Floats) -> GainBounds:
    """Return the gain and its bounds. The first entry of ``drawn_B`` is the estimate, the others are resamples."""
    lower, upper = np.quantile(drawn_B[1:], _TAILS)
    return GainBounds(estimate=float(drawn_B[0]), lower=float(lower), upper=float(upper))


def _cost_ratios(costs: PairedStepCosts, rng: np.random.Generator) -> Floats:
    """Return deployed over candidate seconds per step, [1 + resamples].

    Each is the median of the rounds' ratios: a disturbance of a whole round cancels in its ratio, and one of a single
    measurement does not move the median.
    """
    rounds = len(costs.deployed_R)
    drawn_BR = np.vstack([np.arange(rounds), rng.integers(rounds, size=(_RESAMPLES, rounds))])
    ratios: Floats = np.median((costs.deployed_R / costs.candidate_R)[drawn_BR], axis=1)
    return ratios


def _steps_per_token(domain: Domain, rng: np.random.Generator) -> Floats:
    """Return the steps per token of both drafts, [2, 1 + resamples], as ratios of sums over the drawn conversations."""
    count = len(domain.tokens_C)
    sums_3C = np.stack([domain.deployed_C, domain.candidate_C, domain.tokens_C])
    parts = [sums_3C.sum(axis=1, keepdims=True)]
    for start in range(0, _RESAMPLES, _AT_ONCE):
        times_BC = rng.multinomial(count, np.full(count, 1 / count), size=min(_AT_ONCE, _RESAMPLES - start))
        parts.append(sums_3C @ times_BC.T)
    sums_3B = np.hstack(parts)
    ratios: Floats = sums_3B[:2] / sums_3B[2]
    return ratios


# Pools of small domains: domains with too few conversations for a verdict of their own are judged together.
#
# A pool keeps the verdict possible where traffic has many rare tasks. It cannot hide a large domain: one with at least
# ``LARGEST_POOLED_SHARE`` of the traffic is judged by itself, however few its conversations are. Captured and golden
# domains are pooled apart, because the first count for the mix and the second guard what the deployed draft knows.

LARGEST_POOLED_SHARE = 0.1
"""Share of the traffic's tokens from which a domain is never pooled."""
CAPTURED_POOL, GOLDEN_POOL = "pool of small domains", "golden/pool of small domains"


@dataclass(frozen=True, slots=True)
class PooledDomains:
    """Domains to judge. ``members`` maps the name of a pool to the names of the domains in it."""

    domains: tuple[Domain, ...]
    members: dict[str, tuple[str, ...]]


def pool_small_domains(domains: Sequence[Domain]) -> PooledDomains:
    """Return the domains with small ones pooled; at most one pool of captured and one of golden domains.

    A pool that is itself too small takes in the smallest other domain of its kind, if that one may be pooled.
    """
    judged: list[Domain] = []
    members: dict[str, tuple[str, ...]] = {}
    for name, kind in (
        (CAPTURED_POOL, [domain for domain in domains if domain.weight > 0]),
        (GOLDEN_POOL, [domain for domain in domains if not domain.weight > 0]),
    ):
        pooled = _members(kind)
        judged += [domain for domain in kind if domain not in pooled]
        if pooled:
            judged.append(_pool(name, pooled))
            members[name] = tuple(domain.name for domain in pooled)
    return PooledDomains(tuple(judged), members)


def _members(domains: Sequence[Domain]) -> list[Domain]:
    """Return the domains of one kind to pool; none if fewer than two would be together."""
    eligible = sorted((d for d in domains if d.weight < LARGEST_POOLED_SHARE), key=_conversations)
    pooled = [domain for domain in eligible if _conversations(domain) < MIN_CONVERSATIONS]
    if pooled and sum(map(_conversations, pooled)) < MIN_CONVERSATIONS:
        pooled = eligible[: len(pooled) + 1]
    return pooled if len(pooled) > 1 else []


def _pool(name: str, domains: Sequence[Domain]) -> Domain:
    return Domain(
        name,
        sum(domain.weight for domain in domains),
        np.concatenate([domain.tokens_C for domain in domains]),
        np.concatenate([domain.deployed_C for domain in domains]),
        np.concatenate([domain.candidate_C for domain in domains]),
    )


def _conversations(domain: Domain) -> int:
    return len(domain.tokens_C)


# Calibration of a draft for sampled text: a factor on the draft's logits for every depth.
#
# With coupled sampling the draft proposes the top of log q + g, where g is the target's own noise. A head trained on
# soft targets is flatter than the target where it is uncertain, so it follows the noise instead of its own
# distribution. A factor above one corrects this. The factors that agree with the target most often on validation text
# are written to calibration.json, a file of its own, so that the weights keep their standard format. It holds factors
# by depth for each temperature, and common factors by depth for workers that do not distinguish temperatures.

FACTORS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4, 2.8)
TEMPERATURES = (0.3, 0.6, 0.8, 1.0)
_POOLED = (0.6, 0.8, 1.0)
"""Temperatures that select the common factors. At lower temperatures every factor agrees nearly as often."""
_BATCH, _PIECE = 2, 512


@torch.inference_mode()
def agreement(head: Draft, conversations: Sequence[Conversation], output_VE: Tensor, *, depth: int) -> Tensor:
    """Return the share of slots where target and draft draw the same token from the same noise.

    The result is [temperatures, depth, factors], in the order of ``TEMPERATURES`` and ``FACTORS``.
    """
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(len(TEMPERATURES), depth, len(FACTORS))
    slots = torch.zeros(depth, 1)
    vocabulary = vocabulary_of(head, len(output_VE))
    texts = [piece for conversation in conversations for piece in pieces(conversation, _PIECE)]
    for start in range(0, len(texts), _BATCH):
        batch = batch_for(head, texts[start : start + _BATCH], output_VE.dtype)
        target_BAV = (batch.final_BAE @ output_VE.T).float()
        # The noise is drawn on the CPU, so that it is the same on every device.
        noise_BAV = -torch.empty(target_BAV.shape).exponential_(generator=generator).log_().to(target_BAV.device)
        for k, (state_BAE, rooted_BA) in enumerate(unrolled(head, batch, depth)):
            draft_RV, noise_RV = logits_of(head, state_BAE[rooted_BA], k).float(), noise_BAV[rooted_BA]
            slots[k] += len(draft_RV)
            for at, temperature in enumerate(TEMPERATURES):
                drawn_R = (target_BAV[rooted_BA] / temperature + noise_RV).argmax(dim=-1)
                hits[at, k] += _hits(draft_RV / temperature, noise_RV[:, vocabulary], vocabulary, drawn_R)
    return hits / slots.clamp(min=1)


def _hits(draft_RV: Tensor, noise_RV: Tensor, target_ids: Tensor, drawn_R: Tensor) -> Tensor:
    """Return the number of rows where the draft proposes ``drawn_R``, for each factor."""
    proposals = (target_ids[(factor * draft_RV + noise_RV).argmax(dim=-1)] for factor in FACTORS)
    return torch.stack([(proposed_R == drawn_R).sum() for proposed_R in proposals]).cpu()


def write_calibration(
    head: Draft, conversations: Sequence[Conversation], target: CausalLM, output_VE: Tensor, folder: Path, *, depth: int
) -> list[float]:
    """Write ``folder``/calibration.json and return the common factors by depth.

    The file names the target's format: acceptance on another one is another.
    """
    agreements = agreement(head, conversations, output_VE, depth=max_depth(head, depth))
    pooled = agreements[[TEMPERATURES.index(temperature) for temperature in _POOLED]].mean(dim=0)
    document = {
        "target_format": target.form or str(output_VE.dtype).removeprefix("torch."),
        **_best(pooled),
        "temperatures": list(_POOLED),
        "by_temperature": {str(t): _best(of_one) for t, of_one in zip(TEMPERATURES, agreements, strict=True)},
    }
    write_json(folder / CALIBRATION_FILE, document)
    sharpness: list[float] = document["sharpness"]
    return sharpness


def _best(agreement_DF: Tensor) -> dict[str, Any]:
    """Return the best factor and its agreement by depth, from agreements [depth, factors]."""
    return {
        "sharpness": [FACTORS[int(best)] for best in agreement_DF.argmax(dim=-1)],
        "agreement": [round(float(share), 4) for share in agreement_DF.max(dim=-1).values],
        "agreement_uncalibrated": [round(float(share), 4) for share in agreement_DF[:, FACTORS.index(1.0)]],
    }


CONTEXT = 256  # tokens of context at which steps are timed


class ZeroContextAttention(Attend):
    """Attention over a context of zeros and the new tokens, to time a pass behind a context."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return the attended values, see ``layers.Attend``."""
        before = k_TKD.new_zeros(CONTEXT, *k_TKD.shape[1:])
        keys, values = (torch.cat((before, x)).transpose(0, 1)[None] for x in (k_TKD, v_TKD))
        q = q_THD.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)[0].transpose(0, 1)


# Step counts of two drafts on the same recorded answers.
#
# Recorded text does not depend on the draft. One teacher-forced pass per draft and depth therefore gives the number of
# steps exactly, at any temperature, and the difference of the drafts has no variance from different texts.
#
# Shape suffixes: R rows, A answer slots, I roots, K depths or ranks.

_ROWS = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """Replayed record with the states that drafts read."""

    record: Record
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class CalibratedDraft:
    """Draft head and the factors on its logits by depth for sampled text.

    The last factor applies to all deeper depths; without factors it is 1.
    """

    head: Draft
    sharpness: tuple[float, ...] = ()

    def factor(self, depth: int) -> float:
        """Return the factor on the logits at ``depth``."""
        return self.sharpness[min(depth, len(self.sharpness) - 1)] if self.sharpness else 1.0


@torch.inference_mode()
def count_steps(
    drafts: Sequence[CalibratedDraft], sample: Sample, shape: TreeShape, target: CausalLMConfig
) -> list[StepCounts]:
    """Return for each draft the step counts of ``shape`` through one answer of the target.

    ``StepCounts.tokens`` excludes the first token of the answer.
    """
    first, depth = sample.record.prompt_length, max(shape.depths)
    count = len(sample.conversation.tokens_N) - first
    wanted_A = torch.tensor(sample.record.tokens[first + 1 : first + count + 1])
    # Ranks of the recorded tokens by draft, depth and piece of the text.
    ranks: list[list[list[Tensor]]] = [[[] for _ in range(depth)] for _ in drafts]
    states = [_states(draft.head, sample.conversation, depth) for draft in drafts]
    for start in range(0, count, _ROWS):
        here = slice(start, min(start + _ROWS, count))
        rows = RecordPositions(sample.record, first + start, here.stop - start, target)
        for draft, states_KAE, of_draft in zip(drafts, states, ranks, strict=True):
            for k, state_AE in enumerate(states_KAE):
                of_draft[k].append(ranks_of(wanted_A[here], _proposed(draft, rows, state_AE[here], k)))
    counts = []
    for of_draft in ranks:
        counts.append(StepCounts())
        counts[-1].walk(by_root([torch.cat(parts) for parts in of_draft]), shape)
        # The last step may emit a token beyond the end of the answer, which no client receives.
        counts[-1].tokens = count
    return counts


def _states(head: Draft, conversation: Conversation, depth: int) -> list[Tensor]:
    """Return the head's states by depth, [A, E], at every slot of the answer."""
    batch = batch_for(head, [conversation], next(head.parameters()).dtype)
    return [state_BAE[0] for state_BAE, _ in unrolled(head, batch, depth)]


def _proposed(draft: CalibratedDraft, rows: RecordPositions, state_RE: Tensor, depth: int) -> Tensor:
    """Return the draft's best tokens behind these slots, [R, X]."""
    logits_RV = logits_of(draft.head, state_RE, depth).cpu()
    target_ids_V = vocabulary_of(draft.head, logits_RV.shape[-1]).cpu()
    return rows.propose(logits_RV, target_ids_V, draft.factor(depth), min(RANKS, logits_RV.shape[-1]))


# Paired step times of two drafts on this machine, measured in alternation so that drift affects both equally.
#
# Only the networks are timed, with one sequence. The target's verification of the shape is timed once per round and
# counts for both. A draft adds one pass per depth of the shape, a parallel draft one pass for all of them.

ROUNDS = 40
_WARM = 2


@torch.inference_mode()
def step_costs(
    target: CausalLM, deployed: Draft, candidate: Draft, shape: TreeShape, *, rounds: int = ROUNDS
) -> PairedStepCosts:
    """Return the seconds per step by round, on a CPU processor seconds. The two drafts alternate in going first."""
    depth = max(shape.depths)
    verify = _verification(target, 1 + shape.nodes)
    drafts = (_draft_step(deployed, depth), _draft_step(candidate, depth))
    on_gpu = target.lm_head.weight.is_cuda
    seconds_R2 = np.zeros((rounds, 2))
    for number in range(-_WARM, rounds):
        verified = _seconds(verify, on_gpu=on_gpu)
        for which in (0, 1) if number % 2 else (1, 0):
            drafted = _seconds(drafts[which], on_gpu=on_gpu)
            if number >= 0:
                seconds_R2[number, which] = verified + drafted
    return PairedStepCosts(seconds_R2[:, 0], seconds_R2[:, 1])


def _seconds(once: Callable[[], object], *, on_gpu: bool) -> float:
    """Return the seconds of a call.

    On a CPU these are processor seconds over all threads, which exclude the load of other processes.
    """
    if not on_gpu:
        began = time.process_time()
        once()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    once()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _verification(target: CausalLM, tokens: int) -> Callable[[], object]:
    """Return a function that runs one verification pass over ``tokens`` tokens."""
    # The tokens follow a context, shortened if the model has too few positions.
    first = min(CONTEXT, target.config.max_position_embeddings - tokens)
    positions = first + torch.arange(tokens, device=target.lm_head.weight.device)

    def verify() -> object:
        out = target(
            torch.ones_like(positions), positions, ZeroContextAttention(), TargetStates(target.config.aux_layers)
        )
        return target.logits(out.hidden_TE).argmax(dim=-1)

    return verify


def _draft_step(draft: Draft, depth: int) -> Callable[[], object]:
    """Return a function that runs the draft passes of one step for a chain of ``depth`` tokens."""
    match draft:
        case PEagleHead():
            return _head_pass(draft, slots=depth)
        case DFlashHead():
            return _block_pass(draft, depth)
        case Eagle3Head():
            run = _head_pass(draft, slots=1)
            return lambda: [run() for _ in range(depth)]
    raise TypeError(f"{type(draft).__name__} is not distilled")


def _head_pass(head: Eagle3Head, slots: int) -> Callable[[], object]:
    """Return a function that runs one pass of a head over ``slots`` slots of one sequence."""
    weight = head.fc.weight
    hidden = torch.zeros(slots, head.config.hidden_size, dtype=weight.dtype, device=weight.device)
    tokens, positions = _slots(slots, head.config.max_position_embeddings, weight.device)
    return lambda: head.logits(head(hidden, tokens, positions, ZeroContextAttention())).topk(1)


def _block_pass(head: DFlashHead, depth: int) -> Callable[[], object]:
    """Return a function that reads the target's states of one token, and runs a block of ``depth`` mask slots."""
    weight = head.fc.weight
    states = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    tokens, positions = _slots(depth + 1, head.config.max_position_embeddings, weight.device)

    def run() -> object:
        head.context(states, positions[:1])
        return head.logits(head(tokens, positions, ZeroContextAttention())[1:]).topk(1)

    return run


def _slots(count: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens and positions of ``count`` slots behind a context, shortened for a model of few positions."""
    first = min(CONTEXT, positions - count)
    return torch.ones(count, dtype=torch.int64, device=device), first + torch.arange(count, device=device)
