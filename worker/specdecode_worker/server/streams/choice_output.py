"""Output of one choice: converts its tokens into pieces of text, whether they arrive or are replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from specdecode_worker.contract.internal_stream import Counters
from specdecode_worker.engine.finish_rule import FinishRule
from specdecode_worker.engine.ipc.messages import Logprobs, Tokens
from specdecode_worker.server.errors import BadRequest, EngineFailed
from specdecode_worker.server.responses import ChoicePiece, Statistics
from specdecode_worker.server.text.detokenizer import ChoiceDetokenizer, TextOptions
from specdecode_worker.server.text.prompts import Prompt
from specdecode_worker.server.text.tokenizer import Tokenizer

NO_COUNTS = Counters()


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Output options of one generation. Without ``generates`` only the echo of the prompt is returned."""

    text_options: TextOptions
    has_logprobs: bool = False
    """True when the engine returns log-probabilities, for the client or only to rank the choices of best_of."""
    generates: bool = True
    counts_prompt: bool = True
    """False for the further choices of a prompt, so that its tokens count once in the usage."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Output of a choice that an earlier attempt on another worker has emitted."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    counters: Counters = NO_COUNTS


class ChoiceOutput:
    """Converter of the tokens of one choice, with the counts of all attempts. ``counters`` are those of earlier ones.

    Text, log-probabilities and counts after a token depend on the tokens up to it and not on their messages.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Prompt, options: OutputOptions, counters: Counters = NO_COUNTS
    ) -> None:
        self._prompt, self._options = prompt, options
        self._echo = prompt.echo
        first_offset = len(prompt.echo.text) if prompt.echo is not None else 0
        self._detokenizer = ChoiceDetokenizer(tokenizer, prompt.ids, options.text_options, first_offset=first_offset)
        self._earlier, self._now = counters, counters
        self.length = 0
        """Number of output tokens so far. Tokens behind a stop string are not part of the output."""
        self.finish_reason: str | None = None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token; 0 without log-probabilities."""
        return self._detokenizer.mean_logprob

    @property
    def counters(self) -> Counters:
        """Counts of the choice so far."""
        return self._now

    @property
    def statistics(self) -> Statistics:
        """Token and speculation counts so far."""
        now = self._now
        return Statistics(
            prompt_tokens=len(self._prompt.ids),
            completion_tokens=self._detokenizer.count,
            cached_tokens=now.cached_tokens,
            drafts=now.drafts,
            draft_tokens=now.draft_tokens,
            accepted=now.accepted,
            counts_prompt=self._options.counts_prompt,
        )

    def push(self, tokens: Tokens) -> ChoicePiece:
        """Return the piece that a message of the engine adds.

        Raises:
            EngineFailed: Log-probabilities are missing.
        """
        self._count(tokens)
        if self._options.has_logprobs and len(tokens.logprobs) != len(tokens.tokens):
            raise EngineFailed("the engine returned no log-probabilities")
        echo = self._echoed(tokens)
        if not self._options.generates:
            self.length += len(tokens.tokens)
            piece = ChoicePiece(echo.text, "length", echo.scored)
        else:
            new = self._detokenizer.push(tokens)
            self.length = self._detokenizer.count
            piece = ChoicePiece(echo.text + new.text, new.finish_reason, echo.scored + new.scored)
        self.finish_reason = piece.finish_reason
        return piece

    def replay(self, progress: Progress, rule: FinishRule) -> list[ChoicePiece]:
        """Process the output of an earlier attempt token by token, and return its pieces.

        Raises:
            BadRequest: There are tokens behind the end of the choice, or log-probabilities are missing.
        """
        if self._options.has_logprobs and len(progress.logprobs) != len(progress.ids):
            raise BadRequest("the progress of a choice lacks log-probabilities of its tokens", param="resume")
        pieces: list[ChoicePiece] = []
        for tokens in _messages(progress, rule):
            if self.finish_reason is not None:
                raise BadRequest("the progress of a choice has tokens behind its end", param="resume")
            pieces.append(self.push(tokens))
        return pieces

    def _count(self, tokens: Tokens) -> None:
        """Add the engine's counters, which are totals of this attempt, to those of earlier attempts."""
        before = self._earlier
        self._now = Counters(
            before.cached_tokens + tokens.cached_tokens,
            before.drafts + tokens.drafts,
            before.draft_tokens + tokens.draft_tokens,
            before.accepted + tokens.accepted,
        )

    def _echoed(self, tokens: Tokens) -> ChoicePiece:
        """Return the echoed prompt with the first message, and an empty piece afterwards."""
        echo, self._echo = self._echo, None
        if echo is None:
            return ChoicePiece("", None)
        if not self._options.text_options.logprobs:
            return ChoicePiece(echo.text, None)
        if len(tokens.prompt_logprobs) != len(self._prompt.ids) - 1:
            raise EngineFailed("the engine returned no log-probabilities of the prompt")
        return ChoicePiece(echo.text, None, echo.scored(self._prompt.ids, tokens.prompt_logprobs))


def split(tokens: Tokens) -> Iterator[Tokens]:
    """Yield a message as messages of one token each."""
    last = len(tokens.tokens) - 1
    if last < 1:
        yield tokens
        return
    for index, token in enumerate(tokens.tokens):
        yield msgspec.structs.replace(
            tokens,
            tokens=(token,),
            finish=tokens.finish if index == last else None,
            logprobs=tokens.logprobs[index : index + 1],
            prompt_logprobs=tokens.prompt_logprobs if index == 0 else (),
        )


def _messages(progress: Progress, rule: FinishRule) -> Iterator[Tokens]:
    """Yield the messages in which the engine would have sent the output, one for each token."""
    for index, token in enumerate(progress.ids):
        yield Tokens(
            request_id="",
            tokens=(token,),
            finish=rule.finish(token, index + 1),
            logprobs=progress.logprobs[index : index + 1],
            prompt_logprobs=progress.prompt_logprobs if index == 0 else (),
        )
