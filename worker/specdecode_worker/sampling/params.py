"""Sampling parameters of requests: on the host, and as the tables of a step, in which every row is one request.

A sampling parameter is a field of `Sampling` and an entry of `COLUMNS`. The sampler (sampler.py) reads the
tables, in captured steps and in others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec

GREEDY_BELOW = 1e-5
"""Temperature below which a request is greedy. Logits divided by a tiny one overflow; vLLM takes at least 0.01."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request.

    ``temperature`` 0 is greedy, and one below GREEDY_BELOW becomes 0; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 disable
    truncation. Penalties are those of vLLM: presence and frequency penalties count tokens of the output, the repetition
    penalty those of prompt and output. ``seed`` is always set: the server draws one for a request without a seed.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that can be chosen; empty for all."""
    min_tokens: int = 0
    """Number of output tokens before a stop token can be chosen."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens to return with each chosen token; None for no log probabilities."""
    prompt_logprobs: int | None = None
    """Same as ``logprobs``, for every token of the prompt. Such a request does not reuse a cached prefix."""
    grammar: str = ""
    """Grammar that the answer follows (guided/grammars.py); empty for none."""

    def __post_init__(self) -> None:
        if 0 < self.temperature < GREEDY_BELOW:
            msgspec.structs.force_setattr(self, "temperature", 0.0)


class SamplingParams(Sampling, frozen=True, kw_only=True, dict=True):
    """Sampling parameters of one request as its steps apply them. ``logit_bias`` has each token once.

    ``blocked`` are token ids that cannot be chosen before ``min_tokens`` answer tokens. A request with a grammar has
    none, because the masks of the grammar (`guided/guide.py`) include ``min_tokens``. The answer begins at position
    ``prompt_tokens``.
    """

    blocked: tuple[int, ...] = ()
    prompt_tokens: int = 0

    @cached_property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0

    @cached_property
    def truncated(self) -> bool:
        """True if top-k, top-p or min-p removes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def counts(self) -> bool:
        """True if a penalty depends on the tokens emitted so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def guided(self) -> bool:
        """True if the answer follows a grammar."""
        return bool(self.grammar)

    @cached_property
    def blocks(self) -> bool:
        """True if tokens are blocked before min_tokens."""
        return self.min_tokens > 0 and bool(self.blocked)

    @cached_property
    def adjusts(self) -> bool:
        """True if logits of single tokens change, which also affects greedy decoding."""
        return self.counts or self.blocks or self.guided or bool(self.logit_bias or self.allowed_token_ids)


# Rule for the end of a request by its tokens. Engine and server share it, so it needs no torch.


@dataclass(frozen=True, slots=True)
class FinishRule:
    """Rule that ends one request at a stop token, or at its largest number of output tokens."""

    stops: frozenset[int]
    """Token ids that end the request, once it has ``min_tokens``. They include ``ends``."""
    ends: frozenset[int]
    """Token ids that end it in any case: the model's end tokens in a guided answer, whose grammar is complete there."""
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, sampling: Sampling, eos_token_ids: Iterable[int]) -> FinishRule:
        """Return the rule for the sampling parameters of a request and the end tokens of the model."""
        eos, stops = frozenset(eos_token_ids), frozenset(sampling.stop_token_ids)
        ends = eos if sampling.grammar else frozenset()
        return cls(
            stops=stops | (ends if sampling.ignore_eos else eos),
            ends=ends,
            min_tokens=sampling.min_tokens,
            max_tokens=sampling.max_tokens,
        )

    def may_finish(self, tokens: Sequence[int], emitted: int) -> bool:
        """Return whether one of ``tokens`` may end the request; the last one is output token number ``emitted``."""
        return emitted >= self.max_tokens or not self.stops.isdisjoint(tokens)

    def finish(self, token: int, emitted: int) -> Literal["stop", "length"] | None:
        """Return the finish reason at ``token``, which is output token number ``emitted`` (from 1); None to go on."""
        if token in self.ends or (token in self.stops and emitted >= self.min_tokens):
            return "stop"
        return "length" if emitted >= self.max_tokens else None


# Optional parts of a step, which follow from the sampling parameters of its rows.


@dataclass(frozen=True, slots=True, order=True)
class Features:
    """Optional parts of a step. Graphs with any of them are captured when they are needed, so others never pay.

    ``adjusts`` is the width of the tables of allowed, biased and blocked tokens, 0 if no request adjusts logits.
    ``history`` is the number of text positions whose tokens are counted for penalties, 0 without penalties. ``masks``
    is set if a request follows a grammar, ``logprobs`` if one wants log-probabilities. ``rounds`` is the greatest
    number of siblings in a tree if a request is sampled in several rounds, 0 if the target chooses one token behind
    each node.
    """

    adjusts: int = 0
    history: int = 0
    masks: bool = False
    logprobs: bool = False
    rounds: int = 0

    @property
    def change_logits(self) -> bool:
        """True if logits are adjusted or masked before a token is chosen."""
        return self.adjusts > 0 or self.masks


NO_FEATURES = Features()


def features_of(
    batch: Sequence[SamplingParams], longest: Callable[[], int], siblings: int, *, coupled: bool
) -> Features:
    """Return the optional parts of a step, without log-probabilities, in the least sizes that hold its rows.

    Args:
        batch: Parameters of the rows.
        longest: Returns the number of positions that hold the root of every row; called if tokens are counted.
        siblings: Greatest number of siblings in a tree.
        coupled: The sampler is ``coupled``, else ``mss``.
    """
    rounds = 0 if coupled or all(params.greedy for params in batch) else siblings
    adjusting = [params for params in batch if params.adjusts]
    if not adjusting and not rounds:
        return NO_FEATURES
    counts = any(params.counts for params in adjusting)
    width = max(map(width_of, adjusting), default=0)
    return Features(
        adjusts=max(width, int(counts)),
        history=longest() if counts else 0,
        masks=any(params.guided for params in adjusting),
        rounds=rounds,
    )


def width_of(params: SamplingParams) -> int:
    """Return the number of columns that the request needs in the tables of allowed, biased and blocked tokens."""
    return max(len(params.logit_bias), len(params.allowed_token_ids), len(params.blocked) if params.blocks else 0)


def truncates(batch: Sequence[SamplingParams]) -> bool:
    """Return whether a row samples with top-k, top-p or min-p."""
    return any(params.truncated and not params.greedy for params in batch)


# Tables of the parameters. The neutral values, which also fill padding, change no logit and cut no token.

TableShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Column:
    """Table of one parameter, [rows], or [rows, width] if ``wide``. Its dtype is that of the ``neutral`` value.

    ``read`` returns the value of a request, or its values if the table is wide; None for the field of that name. Rows
    of a wide table are padded with the neutral value or, if it ``repeats``, with the first value of the row. The table
    exists in steps that adjust logits alone if it ``adjusts``.
    """

    name: str
    neutral: int | float
    read: Callable[[SamplingParams], Any] | None = None
    adjusts: bool = False
    wide: bool = False
    repeats: bool = False

    def values(self, batch: Sequence[SamplingParams], width: int) -> list[Any]:
        """Return the values of all rows, one row after the other."""
        read = self.read
        found = [getattr(params, self.name) if read is None else read(params) for params in batch]
        if not self.wide:
            return found
        flat: list[Any] = []
        for row in found:
            flat += row
            flat += [row[0] if self.repeats and row else self.neutral] * (width - len(row))
        return flat


COLUMNS = (
    Column("seed", 0),
    Column("top_k", 0),
    Column("temperature", 0.0),
    Column("top_p", 1.0),
    Column("min_p", 0.0),
    Column("prompt_tokens", 0, adjusts=True),
    Column("min_tokens", 0, lambda params: params.min_tokens if params.blocks else 0, adjusts=True),
    Column("repetition_penalty", 1.0, adjusts=True),
    Column("frequency_penalty", 0.0, adjusts=True),
    Column("presence_penalty", 0.0, adjusts=True),
    Column("bias_ids", 0, lambda params: [token for token, _ in params.logit_bias], adjusts=True, wide=True),
    Column("bias", 0.0, lambda params: [value for _, value in params.logit_bias], adjusts=True, wide=True),
    # Rows of these repeat one of their own tokens: another one would be allowed, or a blocked one occur as a free one.
    Column("allowed_ids", -1, lambda params: params.allowed_token_ids, adjusts=True, wide=True, repeats=True),
    Column(
        "blocked_ids", 0, lambda params: params.blocked if params.blocks else (), adjusts=True, wide=True, repeats=True
    ),
)
"""All tables of sampling parameters."""


def columns_of(features: Features, kind: type) -> list[Column]:
    """Return the tables of a step with values of this type, int or float."""
    return [one for one in COLUMNS if type(one.neutral) is kind and (features.adjusts > 0 or not one.adjusts)]


def column_shapes(rows: int, features: Features, kind: type) -> TableShapes:
    """Return the shapes of the tables of a step with values of this type, by name."""
    return {one.name: (rows, features.adjusts) if one.wide else (rows,) for one in columns_of(features, kind)}


def column_values(batch: Sequence[SamplingParams], rows: int, features: Features, kind: type) -> dict[str, list[Any]]:
    """Return the values of these tables, flat and padded to ``rows`` rows."""
    more, width = rows - len(batch), features.adjusts
    return {
        one.name: one.values(batch, width) + [one.neutral] * (more * (width if one.wide else 1))
        for one in columns_of(features, kind)
    }
