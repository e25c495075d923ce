"""Captured answers chosen again: what the target would not say by its own law is no text of its, and no text to learn.

One teacher-forced pass gives the logits at every place of a record; the engine's own sampling code then chooses there,
with the record's parameters and seed. The same rows let a draft propose, so that acceptance follows at any temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from specdecode_worker.capture import Record
from specdecode_worker.engine.ipc.messages import Submit
from specdecode_worker.engine.sampling_params import check_tokens, law_of
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.speculation.sampling.coupling import Coupling
from specdecode_worker.speculation.sampling.params import Law
from specdecode_worker.speculation.sampling.token_counts import Texts
from specdecode_worker.speculation.trees import PLAIN, forest_of
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.data.state_recording import read_states

SHORTEST_OUTPUT = 2
"""Tokens; the first comes out of the prompt and teaches a draft nothing."""
TIE_LOGITS = {torch.float32: 2e-3, torch.bfloat16: 0.5}
"""How far two passes over one text may be apart, by what they calculate in: other batches, other kernels."""
_ROWS = 64


class Unfit(StrEnum):
    """Why a record is not used."""

    other_target = "other_target"
    too_old = "too_old"
    malformed = "malformed"
    too_short = "too_short"
    too_long = "too_long"
    not_reproduced = "not_reproduced"
    overlaps = "overlaps"
    superseded = "superseded"
    """Newer records fill the room that there is."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A record that the target says again, with its states; ``ties`` are the places where it nearly did not."""

    conversation: Conversation
    ties: int


def misfit(record: Record, target: str, vocab_size: int, positions: int) -> Unfit | None:
    """What is wrong with a record before any pass is made over it."""
    if record.target != target:
        return Unfit.other_target
    inside = 0 < record.prompt_length < len(record.tokens) and all(0 <= t < vocab_size for t in record.tokens)
    if not inside or not _lawful(record, vocab_size):
        return Unfit.malformed
    if record.output_length < SHORTEST_OUTPUT:
        return Unfit.too_short
    return Unfit.too_long if len(record.tokens) > positions else None


def _lawful(record: Record, vocab_size: int) -> bool:
    try:
        check_tokens(_law(record, ()), vocab_size)
    except ValueError:
        return False
    return record.sampling.temperature >= 0 and 0 <= record.sampling.seed < 2**63


@torch.inference_mode()
def replay(target: Llama, record: Record) -> Replayed | Unfit:
    """The record as a conversation to learn from. Its last token is told by the slot before it and kept by none."""
    tokens_N = torch.tensor(record.tokens)
    aux_NA, hidden_NE = read_states(target, tokens_N[:-1])
    ties = near_ties(target, record, hidden_NE[record.prompt_length - 1 :])
    if ties is None:
        return Unfit.not_reproduced
    conversation = Conversation(
        tokens_N=tokens_N[:-1].int(),
        aux_NA=aux_NA,
        hidden_NE=hidden_NE,
        answer_start=record.prompt_length,
        temperature=record.sampling.temperature,
        domain=record.task,
    )
    return Replayed(conversation, ties)


def near_ties(target: Llama, record: Record, hidden_OE: Tensor) -> int | None:
    """How many of the O output tokens are chosen only if their logits are raised by a tie's width; None where that
    does not help: the target does not say this."""
    wanted_O = torch.tensor(record.tokens[record.prompt_length :])
    width = TIE_LOGITS[hidden_OE.dtype]
    ties = 0
    for start in range(0, len(wanted_O), _ROWS):
        here = slice(start, start + _ROWS)
        rows = Rows(record, record.prompt_length - 1 + start, len(wanted_O[here]), target.config.eos_token_ids,
                    target.config.vocab_size)  # fmt: skip
        logits_RV = target.logits(hidden_OE[here]).float()
        missed_R = rows.choose(logits_RV) != wanted_O[here]
        if missed_R.any():
            logits_RV[torch.arange(len(logits_RV)), wanted_O[here]] += width
            if (rows.choose(logits_RV) != wanted_O[here])[missed_R].any():
                return None
            ties += int(missed_R.sum())
    return ties


class Rows:
    """``count`` places of a record's text as steps of one token each: the first root at index ``first``, and so on.

    The noise is drawn once and serves the target and every draft at every depth, for it belongs to the place.
    """

    def __init__(self, record: Record, first: int, count: int, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        roots_B = first + torch.arange(count)
        texts = Texts(torch.tensor([record.tokens]), torch.zeros_like(roots_B), roots_B, len(record.tokens))
        laws = [_law(record, eos_token_ids)] * count
        self._coupling = Coupling(laws, texts, forest_of((PLAIN,) * count, torch.device("cpu")), vocab_size)
        self._row_R, self._node_R = torch.arange(count), torch.zeros(count, dtype=torch.int64)

    def choose(self, logits_RV: Tensor) -> Tensor:
        """[R] what plain decoding emits behind each root."""
        return self._coupling.choose(logits_RV, self._row_R, self._node_R, self._node_R)

    def propose(self, logits_RV: Tensor, target_ids_V: Tensor | None, sharpness: float, k: int) -> Tensor:
        """[R, k] target ids, best first, of a draft's logits behind each root."""
        at = (self._row_R, self._node_R, self._node_R)
        return self._coupling.propose(logits_RV, target_ids_V, *at, sharpness, k)


def _law(record: Record, eos_token_ids: tuple[int, ...]) -> Law:
    prompt = record.tokens[: record.prompt_length]
    return law_of(Submit(request_id="", prompt=prompt, sampling=record.sampling), eos_token_ids)
