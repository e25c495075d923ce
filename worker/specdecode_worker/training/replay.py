"""Verification of captured records: replay each with the target and drop those that the target does not reproduce.

An answer that the target would not generate with the record's sampling parameters is not its own text, so a draft must
not learn it. One teacher-forced pass gives the logits at every position of a record. The engine's own sampling code
then chooses tokens there with the record's parameters and seed. The same rows let a draft propose tokens, which gives
its acceptance at any temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from specdecode_worker.capture import Record
from specdecode_worker.contract.capture import LEAST_SHARE
from specdecode_worker.core.messages import Submit
from specdecode_worker.core.request import check_tokens, sampling_params_of
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import CausalLMConfig
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.sampler import BatchTokens, sampler_of
from specdecode_worker.sampling.trees import PLAIN, Nodes, forest_of
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.rollout import read_states

SHORTEST_OUTPUT = 2
"""Fewest output tokens of a usable record. The first token comes from the prefill and trains no draft."""
TIE_LOGITS = {torch.float32: 2e-3, torch.bfloat16: 0.5}
"""Largest difference of logits between two passes over one text, by dtype.

Other batch sizes and other kernels round differently.
"""
_ROWS = 64
_CPU = torch.device("cpu")


class DropReason(StrEnum):
    """Reason for which a record is not used."""

    other_target = "other_target"
    too_old = "too_old"
    malformed = "malformed"
    in_future = "in_future"
    too_short = "too_short"
    too_long = "too_long"
    not_reproduced = "not_reproduced"
    overlaps = "overlaps"
    superseded = "superseded"
    """Dropped because newer records fill the token budget of its split."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Record that the target reproduces, with its states.

    ``ties`` is the number of its tokens that the target chose only as near ties.
    """

    conversation: Conversation
    ties: int


def static_drop_reason(record: Record, target: str, vocab_size: int, positions: int) -> DropReason | None:
    """Return why a record cannot be used, as far as that is known without a pass of the target, or None."""
    if record.target != target:
        return DropReason.other_target
    if not _has_valid_weight(record):
        return DropReason.malformed
    inside = 0 < record.prompt_length < len(record.tokens) and all(0 <= t < vocab_size for t in record.tokens)
    if not inside or not _has_valid_sampling(record, vocab_size):
        return DropReason.malformed
    if record.output_length < SHORTEST_OUTPUT:
        return DropReason.too_short
    return DropReason.too_long if len(record.tokens) > positions else None


def _has_valid_weight(record: Record) -> bool:
    """Return whether the record's share and time are numbers that a worker writes.

    A record weighs 1/share, so one with a tiny share would take all of the mix.
    """
    return LEAST_SHARE <= record.share <= 1 and math.isfinite(record.time_seconds)


def _has_valid_sampling(record: Record, vocab_size: int) -> bool:
    """Return whether the record's sampling parameters are valid."""
    try:
        check_tokens(_sampling_params(record, ()), vocab_size)
    except ValueError:
        return False
    return record.sampling.temperature >= 0 and 0 <= record.sampling.seed < 2**63


@torch.inference_mode()
def replay(target: CausalLM, record: Record) -> Replayed | DropReason:
    """Return the record as a conversation with the target's states, or the reason why it is dropped.

    The conversation leaves out the record's last token: no slot reads it, and the slot before it predicts it.
    """
    tokens_N = torch.tensor(record.tokens)
    aux_NA, hidden_NE = read_states(target, tokens_N[:-1])
    ties = near_ties(target, record, hidden_NE[record.prompt_length - 1 :])
    if ties is None:
        return DropReason.not_reproduced
    conversation = Conversation(
        tokens_N=tokens_N[:-1].int(),
        aux_NA=aux_NA,
        hidden_NE=hidden_NE,
        answer_start=record.prompt_length,
        temperature=record.sampling.temperature,
        domain=record.task,
    )
    return Replayed(conversation, ties)


def near_ties(target: CausalLM, record: Record, hidden_OE: Tensor) -> int | None:
    """Return the number of output tokens that are near ties, or None if the target does not reproduce the record.

    A near tie is a token that the target chooses only after its logit is raised by ``TIE_LOGITS``. ``hidden_OE`` are
    the states before each of the O output tokens.
    """
    wanted_O = torch.tensor(record.tokens[record.prompt_length :])
    width = TIE_LOGITS[hidden_OE.dtype]
    ties = 0
    for start in range(0, len(wanted_O), _ROWS):
        here = slice(start, start + _ROWS)
        rows = RecordPositions(record, record.prompt_length - 1 + start, len(wanted_O[here]), target.config)
        # Positions choose on the CPU, whatever device the target runs on.
        logits_RV = target.logits(hidden_OE[here].to(target.lm_head.weight.device)).float().cpu()
        missed_R = rows.choose(logits_RV) != wanted_O[here]
        if missed_R.any():
            logits_RV[torch.arange(len(logits_RV)), wanted_O[here]] += width
            if (rows.choose(logits_RV) != wanted_O[here])[missed_R].any():
                return None
            ties += int(missed_R.sum())
    return ties


class RecordPositions:
    """Consecutive positions of a record's text, each as a decoding step of ``target`` with one token.

    There are ``count`` positions; the root of the first is the token at index ``first``.
    """

    def __init__(self, record: Record, first: int, count: int, target: CausalLMConfig) -> None:
        roots_B1 = torch.cat((first + torch.arange(count), torch.zeros(1, dtype=torch.int64)))
        texts = BatchTokens(torch.tensor([record.tokens]), torch.zeros_like(roots_B1), roots_B1)
        batch, forest = [_sampling_params(record, target.eos_token_ids)] * count, forest_of((PLAIN,) * count, _CPU)
        self._sampler = sampler_of(batch, texts, forest, target.vocab_size, longest=len(record.tokens))
        none_R = torch.zeros(count, dtype=torch.int64)
        self._rows = self._sampler.at(Nodes(torch.arange(count), none_R, none_R))

    def choose(self, logits_RV: Tensor) -> Tensor:
        """Return the token that plain decoding emits after each root, [R]."""
        return self._sampler.choose(self._rows, logits_RV)

    def propose(self, logits_RV: Tensor, target_ids_V: Tensor | None, sharpness: float, k: int) -> Tensor:
        """Return the ``k`` best tokens of a draft's logits after each root as target ids, [R, k], best first."""
        return self._sampler.proposed(self._rows, logits_RV, target_ids_V, sharpness, k)


def _sampling_params(record: Record, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling parameters of the record."""
    prompt = record.tokens[: record.prompt_length]
    return sampling_params_of(Submit(request_id="", prompt=prompt, sampling=record.sampling), eos_token_ids)
