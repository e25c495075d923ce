"""Answers of the target and its hidden states, from which drafts learn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.training.conversations import (
    SHARD_TOKENS,
    Chat,
    Conversation,
    read_shard,
    shard_paths,
    write_shard,
)
from specdecode_worker.training.errors import PromptFileError, TrainingError
from specdecode_worker.training.heads import DenseCache
from specdecode_worker.training.prompts import Question

# Recording of conversations into shards, from a rollout or from a text file. A killed recording resumes.

_TEXT_TOKENS = 384  # tokens of one piece of a text file


def answer_tokens(folder: Path) -> int:
    """Return the number of answer tokens in a folder of shards."""
    return sum(len(c.tokens_N) - c.answer_start for path in shard_paths(folder) for c in read_shard(path))


def record(
    conversations: Iterable[Conversation],
    folder: Path,
    *,
    tokens: int,
    log: Callable[[str], None],
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write shards until ``folder`` holds about ``tokens`` answer tokens or the conversations end.

    About ``shard_tokens`` tokens with their states are held in memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    already = total = answer_tokens(folder)
    started = time.monotonic()
    waiting: list[Conversation] = []
    source = iter(conversations)
    while total < tokens:
        conversation = next(source, None)
        waiting += [conversation] if conversation else []
        answers = sum(len(c.tokens_N) - c.answer_start for c in waiting)
        full = sum(len(c.tokens_N) for c in waiting) >= shard_tokens or total + answers >= tokens
        if waiting and (full or conversation is None):
            write_shard(folder, len(shard_paths(folder)), waiting)
            total, waiting = total + answers, []
            rate = (total - already) / (time.monotonic() - started)
            left = max(tokens - total, 0) / rate / 60
            log(f"recording: {total} of {tokens} answer tokens, {rate:.0f} tokens/s, {left:.1f} min left")
        if conversation is None:
            return


def text_conversations(target: CausalLM, chat: Chat, path: Path, skip_tokens: int) -> Iterator[Conversation]:
    """Yield pieces of a text file with the target's states. All tokens of a piece but the first count as answer.

    The text is not the target's own, so training on it is off-policy, but recording it is cheap.

    Raises:
        PromptFileError: The file cannot be read as text.
    """
    try:
        ids = chat.encode(path.read_text())[skip_tokens:]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path} cannot be read as text: {error}") from None
    for start in range(0, len(ids), _TEXT_TOKENS):
        piece = torch.tensor(ids[start : start + _TEXT_TOKENS])
        if len(piece) > 2:
            aux_NA, hidden_NE = read_states(target, piece)
            yield Conversation(piece.int(), aux_NA, hidden_NE, answer_start=1, temperature=0.0, domain="text")


@torch.inference_mode()
def read_states(target: CausalLM, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's layer states [N, 3E] and last hidden state [N, E] over one text, on the CPU."""
    device = target.lm_head.weight.device
    positions_N = torch.arange(len(tokens_N), device=device)
    out = target(tokens_N.to(device), positions_N, causal_attention, TargetStates(target.config.aux_layers))
    assert isinstance(out.aux_TA, Tensor)
    return out.aux_TA.cpu(), out.hidden_TE.cpu()


def causal_attention(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return causal attention over one text."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


# On-policy text generation: the target answers many questions at once while its hidden states are recorded.
#
# Every step feeds one token to each row, either a question token or one just sampled. A row whose conversation ends
# starts the next one at once, so the matrices stay full. For training, an answer is cut where it begins to loop: a
# small model loops, and a draft trained on loops scores higher than it performs. Some repeats stay, because a draft
# learns to copy only from text that repeats.

LOOP_NGRAM, LOOP_COUNT = 10, 6
SHORTEST_ANSWER = 12
MAX_CONSECUTIVE_DROPS = 200
"""Number of consecutively dropped answers after which the rollout fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings of a rollout. ``rows`` is the number of conversations generated at once."""

    rows: int = 96
    question_tokens: int = 224  # most tokens of a question that the target generates, with its template
    answer_tokens: int = 320
    for_training: bool = True  # cut loops and drop short answers
    seed: int = 0


@dataclass(slots=True)
class Row:
    """Conversation in progress. ``forced`` tokens are fed next, without sampling."""

    question: Question
    forced: list[int]
    answer_start: int | None  # None while the target is still generating its question
    tokens: list[int] = field(default_factory=list)
    ngrams: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def is_too_short(self) -> bool:
        """True when the answer is short apart from its repeats."""
        assert self.answer_start is not None
        repeats = self.ngrams.total() - len(self.ngrams)
        return len(self.tokens) - self.answer_start - repeats < SHORTEST_ANSWER

    @property
    def draw_temperature(self) -> float:
        """Sampling temperature of the next token: 1 in a generated question."""
        return 1.0 if self.answer_start is None else self.question.temperature

    def repeats_with(self, token: int) -> bool:
        """Count the n-gram that ``token`` completes, and return whether it has now occurred too often in the answer."""
        assert self.answer_start is not None
        last = (*self.tokens[max(self.answer_start, len(self.tokens) - LOOP_NGRAM + 1) :], token)
        if len(last) < LOOP_NGRAM:
            return False
        self.ngrams[last] += 1
        return self.ngrams[last] >= LOOP_COUNT


class Rollout:
    """Generator of conversations of one target, until the questions run out.

    ``around`` are the tokens before and after a question that the target generates. ``is_refused`` returns whether such
    a question (as tokens) is to be discarded.
    """

    def __init__(
        self,
        target: CausalLM,
        settings: RolloutSettings,
        questions: Iterator[Question],
        *,
        around: tuple[list[int], list[int]] = ([], []),
        is_refused: Callable[[list[int]], bool] = lambda _: False,
    ) -> None:
        self.target, self.settings, self.questions, self.is_refused = target, settings, questions, is_refused
        self.before, self.after = around
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.dropped = 0  # answers dropped since the last one that was kept
        self.rows: list[Row | None] = [self._new_row() for _ in range(settings.rows)]
        longest = max([len(row.forced) for row in self.rows if row], default=0)
        self.length = max(settings.question_tokens, longest) + settings.answer_tokens
        dtype = target.model.embed_tokens.weight.dtype
        self.device = target.lm_head.weight.device
        self.cache = DenseCache(target.config, settings.rows, self.length, dtype=dtype, device=self.device)
        self.states_BLS = torch.zeros(settings.rows, self.length, 4 * target.config.hidden_size, dtype=dtype)

    @torch.inference_mode()
    def conversations(self) -> Iterator[Conversation]:
        """Yield the conversations as they end.

        Raises:
            TrainingError: The last ``MAX_CONSECUTIVE_DROPS`` answers were loops or too short.
        """
        while any(self.rows):
            yield from self._step()
            if self.dropped >= MAX_CONSECUTIVE_DROPS:
                raise TrainingError(
                    f"the last {MAX_CONSECUTIVE_DROPS} answers of the target were loops or shorter than "
                    f"{SHORTEST_ANSWER} tokens; is it a chat model, and are these its weights?"
                )

    def _new_row(self) -> Row | None:
        """Return a row with the next question, or None if there is none."""
        question = next(self.questions, None)
        if question is None:
            return None
        if question.ids is None:
            return Row(question, list(self.before), None)
        return Row(question, list(question.ids), len(question.ids))

    def _step(self) -> list[Conversation]:
        """Sample a token for each row that needs one, run the target once and return the conversations that ended."""
        drawing = [i for i, row in enumerate(self.rows) if row and not row.forced]
        ended: list[Conversation] = []
        if drawing:
            drawn = self._draw(drawing)
            ended = [done for i, token in zip(drawing, drawn, strict=True) if (done := self._append_token(i, token))]
        self._run_target()
        return ended

    def _draw(self, drawing: list[int]) -> list[int]:
        """Sample the next token of the rows ``drawing``."""
        rows = [row for i in drawing if (row := self.rows[i])]
        width = self.target.config.hidden_size
        last_R = torch.tensor([len(row.tokens) - 1 for row in rows])
        states_RE = self.states_BLS[torch.tensor(drawing), last_R, 3 * width :]
        # Tokens are drawn on the CPU, so that a seed draws the same ones on every device.
        logits_RV = self.target.logits(states_RE.to(self.device)).float().cpu()
        temperature_R = torch.tensor([row.draw_temperature for row in rows])
        mass_RV = torch.softmax(logits_RV / temperature_R.clamp(min=1e-4)[:, None], dim=-1).cumsum_(dim=-1)
        coin_R1 = torch.rand(len(rows), 1, generator=self.generator) * mass_RV[:, -1:]
        drawn_R = torch.searchsorted(mass_RV, coin_R1).squeeze(1).clamp_(max=logits_RV.shape[1] - 1)
        result: list[int] = torch.where(temperature_R == 0, logits_RV.argmax(dim=-1), drawn_R).tolist()
        return result

    def _append_token(self, index: int, token: int) -> Conversation | None:
        """Append a sampled token to its row.

        Return the conversation if it ends here, and start a new row in its place.
        """
        row = self.rows[index]
        assert row is not None
        if row.answer_start is None:
            self._append_question_token(index, row, token)
            return None
        looping = self.settings.for_training and row.repeats_with(token)
        full = len(row.tokens) - row.answer_start >= self.settings.answer_tokens - 1
        if token not in self.target.config.eos_token_ids and not looping and not full:
            row.forced.append(token)
            return None
        if looping:
            del row.tokens[-(LOOP_NGRAM - 1) :]
        ended = self._recorded(index, row)
        self.rows[index] = self._new_row()
        return ended

    def _append_question_token(self, index: int, row: Row, token: int) -> None:
        """Append a token to a question that the target generates.

        The question ends at an end-of-turn token or when its token budget is used up.
        """
        room = self.settings.question_tokens - len(self.after) - len(row.tokens)
        if token not in self.target.config.eos_token_ids and room > 1:
            row.forced.append(token)
        elif self.is_refused(row.tokens[len(self.before) :]):
            self.rows[index] = self._new_row()
        else:
            row.forced.extend(self.after)
            row.answer_start = len(row.tokens) + len(self.after)

    def _recorded(self, index: int, row: Row) -> Conversation | None:
        """Return the conversation of a finished row, or None if its answer is too short."""
        assert row.answer_start is not None
        n, width = len(row.tokens), self.target.config.hidden_size
        if n <= row.answer_start or (self.settings.for_training and row.is_too_short):
            self.dropped += 1
            return None
        self.dropped = 0
        return Conversation(
            tokens_N=torch.tensor(row.tokens, dtype=torch.int32),
            aux_NA=self.states_BLS[index, :n, : 3 * width].clone(),
            hidden_NE=self.states_BLS[index, :n, 3 * width :].clone(),
            answer_start=row.answer_start,
            temperature=row.question.temperature,
            domain=row.question.domain,
        )

    def _run_target(self) -> None:
        """Run the target on one token of each row and store its states.

        Rows without a conversation idle at position 0.
        """
        positions_B = torch.tensor([len(row.tokens) if row else 0 for row in self.rows])
        tokens_B = torch.zeros(len(self.rows), dtype=torch.int64)
        for i, row in enumerate(self.rows):
            # A row that replaced a refused question is new: its forced tokens are still to be fed.
            if row is not None:
                row.tokens.append(row.forced.pop(0))
                tokens_B[i] = row.tokens[-1]
        here_B = positions_B.to(self.device)
        self.cache.step(here_B)
        reads = TargetStates(self.target.config.aux_layers)
        out = self.target(tokens_B.to(self.device), here_B, self.cache, reads)
        assert isinstance(out.aux_TA, Tensor)
        states_BS = torch.cat((out.aux_TA, out.hidden_TE), dim=-1).cpu()
        self.states_BLS[torch.arange(len(self.rows)), positions_B] = states_BS
