"""Generation of the choices of a request, from its admission to its last token."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from specdecode_worker.contract import internal_stream as contract
from specdecode_worker.contract.internal_stream import ChoiceCounters
from specdecode_worker.core.errors import EngineGone
from specdecode_worker.core.messages import Logprobs, Submit, Tokens
from specdecode_worker.engine.client import Stream
from specdecode_worker.sampling.params import FinishRule, Sampling
from specdecode_worker.server.admission import (
    AdmissionQueue,
    Model,
    ModelLimits,
    RequestTerms,
    sampling_of,
    seeds_of,
    token_limits,
)
from specdecode_worker.server.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    EngineLost,
    Incompatible,
    QueueTimedOut,
    invalid_value,
)
from specdecode_worker.server.prompts import Prompt
from specdecode_worker.server.requests import GenerationRequest
from specdecode_worker.server.responses import (
    ChoicePiece,
    ChoiceStatistics,
    FinishedChoice,
    ScoredToken,
)
from specdecode_worker.server.tools import StopFinder, Tokenizer

# Output of one choice: converts its tokens into pieces of text, whether they arrive or are replayed.
#
# Tokens are processed one by one even if a step returns several, so that the text and the token counts are equal to
# those of decoding without speculation.

NO_COUNTS = ChoiceCounters()


class ChoiceOutput:
    """Converter of the tokens of one choice, with the counts of all attempts. ``counters`` are those of earlier ones.

    Text, log-probabilities and counts after a token depend on the tokens up to it and not on their messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        request: GenerationRequest,
        counters: ChoiceCounters = NO_COUNTS,
        *,
        counts_prompt: bool,
    ) -> None:
        self._prompt, self._echo = prompt, prompt.echo
        self._scores, self._counts_prompt = request.top_logprobs_count is not None, counts_prompt
        self.generates = request.generates
        self._min_tokens, self._shows_stop = request.min_tokens, request.include_stop_str_in_output
        self._text = tokenizer.detokenizer(prompt.ids, skip_special_tokens=request.skip_special_tokens)
        self._stops = StopFinder(request.stop, shows_stop=self._shows_stop)
        self._decoded = self._shown = 0 if prompt.echo is None else len(prompt.echo.text)
        """Numbers of characters so far, with those of an echoed prompt: decoded ones, and those that pieces have."""
        self._unsent: deque[ScoredToken] = deque()
        self._earlier, self.counters = counters, counters
        """Counts of the choice in earlier attempts, and so far."""
        self._drafts = self._accepted = 0
        """Totals of the engine's last message, which are those of this attempt."""
        self.length = 0
        """Number of output tokens so far, with a stop token. Tokens behind a stop string are not part of the output."""
        self.finish_reason: str | None = None

    @property
    def statistics(self) -> ChoiceStatistics:
        """Token and speculation counts so far."""
        now = self.counters
        return ChoiceStatistics(
            prompt_tokens=len(self._prompt.ids),
            completion_tokens=self.length if self.generates else 0,
            cached_tokens=now.cached_tokens,
            draft_tokens=now.draft_tokens,
            acceptance=now.acceptance,
            counts_prompt=self._counts_prompt,
        )

    def push(self, tokens: Tokens) -> ChoicePiece:
        """Return the piece that a message of the engine adds.

        Raises:
            EngineFailed: Log-probabilities are missing.
        """
        self._count(tokens)
        if self._scores and len(tokens.logprobs) != len(tokens.tokens):
            raise EngineFailed("the engine returned no log-probabilities")
        echo = self._echoed(tokens)
        if not self.generates:
            self.length += len(tokens.tokens)
            piece = ChoicePiece(echo.text, "length", echo.scored)
        else:
            new = self._decode(tokens)
            piece = ChoicePiece(echo.text + new.text, new.finish_reason, echo.scored + new.scored)
        self.finish_reason = piece.finish_reason
        return piece

    def replay(self, progress: contract.ChoiceProgress, rule: FinishRule) -> list[ChoicePiece]:
        """Process the output of an earlier attempt token by token, and return its pieces.

        Raises:
            BadRequest: There are tokens behind the end of the choice, or log-probabilities are missing.
        """
        if self._scores and len(progress.logprobs) != len(progress.ids):
            raise BadRequest("the progress of a choice lacks log-probabilities of its tokens", param="resume")
        pieces: list[ChoicePiece] = []
        for tokens in _messages(progress, self._prompt.ids, rule):
            if self.finish_reason is not None:
                raise BadRequest("the progress of a choice has tokens behind its end", param="resume")
            pieces.append(self.push(tokens))
        return pieces

    def _decode(self, tokens: Tokens) -> ChoicePiece:
        """Return the piece of the generated text. One that reaches a stop string has a finish reason."""
        text = ""
        for i, token in enumerate(tokens.tokens):
            self.length += 1
            ends = tokens.finish == "stop" and i == len(tokens.tokens) - 1
            if ends and not self._shows_stop:
                break
            if self._scores:
                self._unsent.append(ScoredToken(token, self._decoded, tokens.logprobs[i]))
            text += self._search(self._text.push(token))
            if self._stops.matched is not None:
                return self._piece(text, "stop")
        if tokens.finish is None:
            return self._piece(text, None)
        text += self._search(self._text.flush())
        text += self._stops.flush()
        return self._piece(text, "stop" if self._stops.matched is not None else tokens.finish)

    def _search(self, text: str) -> str:
        self._decoded += len(text)
        return self._stops.push(text, may_end=self.length > self._min_tokens)

    def _piece(self, text: str, finish_reason: str | None) -> ChoicePiece:
        """Build a piece with ``text`` and the scored tokens that begin in the text returned so far.

        A token that begins behind a stop string is never returned.
        """
        self._shown += len(text)
        send_all = finish_reason is not None and self._stops.matched is None
        sendable = []
        while self._unsent and (send_all or self._unsent[0].offset < self._shown):  # offsets never decrease
            sendable.append(self._unsent.popleft())
        return ChoicePiece(text, finish_reason, tuple(sendable))

    def _count(self, tokens: Tokens) -> None:
        """Add the engine's counters, which are totals of this attempt, to those of earlier attempts."""
        before, acceptance = self._earlier, self.counters.acceptance
        if tokens.drafts > self._drafts:  # a message has the tokens of one step
            accepted = tokens.accepted - self._accepted
            steps = [*acceptance, *[0] * (accepted + 1 - len(acceptance))]
            steps[accepted] += 1
            acceptance = tuple(steps)
            self._drafts, self._accepted = tokens.drafts, tokens.accepted
        self.counters = ChoiceCounters(
            before.cached_tokens + tokens.cached_tokens, before.draft_tokens + tokens.draft_tokens, acceptance
        )

    def _echoed(self, tokens: Tokens) -> ChoicePiece:
        """Return the echoed prompt with the first message, and an empty piece afterwards."""
        echo, self._echo = self._echo, None
        if echo is None:
            return ChoicePiece("", None)
        if not self._scores:
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


def _messages(progress: contract.ChoiceProgress, prompt: Sequence[int], rule: FinishRule) -> Iterator[Tokens]:
    """Yield the messages in which the engine would have sent the output, one for each token."""
    logprobs = _with_tokens(progress.ids, progress.logprobs)
    for index, token in enumerate(progress.ids):
        yield Tokens(
            request_id="",
            tokens=(token,),
            finish=rule.finish(token, index + 1),
            logprobs=logprobs[index : index + 1],
            prompt_logprobs=() if index else _with_tokens(prompt[1:], progress.prompt_logprobs),
        )


def _with_tokens(ids: Sequence[int], logprobs: Sequence[contract.Logprobs]) -> tuple[Logprobs, ...]:
    """Return log-probabilities with their tokens; none if there are none."""
    return tuple(Logprobs(token, *one) for token, one in zip(ids, logprobs, strict=False))


# Earlier attempt of a request on another worker, as a router sends it.

_decode_sampling = msgspec.msgpack.Decoder(Sampling).decode


def earlier_choices(
    request: GenerationRequest, resume: contract.Resume, key: str, limits: ModelLimits
) -> list[tuple[Sampling, contract.ChoiceProgress]]:
    """Return sampling parameters and output so far of each choice of an earlier attempt, which are checked.

    Args:
        request: The validated request body.
        resume: Start and progress of the attempt.
        key: Compatibility key of this worker.
        limits: Limits of the model.

    Raises:
        Incompatible: The attempt ran on a worker whose text may differ, or it does not fit this worker.
        BadRequest: The attempt does not belong to the request.
    """
    start = resume.open
    if start.compatibility_key != key:
        raise Incompatible("this worker cannot continue the request: its compatibility key differs")
    prompts, made = request.prompt_count, request.n
    if len(start.prompts) != prompts or not all(start.prompts):
        raise _no_attempt("the number of prompts")
    if len(start.choices) != prompts * made or len(resume.choices) != len(start.choices):
        raise _no_attempt("the number of choices")
    if [choice.prompt for choice in start.choices] != [index // made for index in range(len(start.choices))]:
        raise _no_attempt("the prompt of a choice")
    return [
        _earlier_choice(choice, start.prompts[choice.prompt], progress, limits)
        for choice, progress in zip(start.choices, resume.choices, strict=True)
    ]


def contract_logprobs(logprobs: Sequence[Logprobs]) -> tuple[contract.Logprobs, ...]:
    """Return log-probabilities as frames have them, without the token."""
    return tuple((one.logprob, one.rank, one.top_tokens, one.top_logprobs) for one in logprobs)


def _earlier_choice(
    choice: contract.ChoiceStart, prompt: Sequence[int], progress: contract.ChoiceProgress, limits: ModelLimits
) -> tuple[Sampling, contract.ChoiceProgress]:
    try:
        sampling = _decode_sampling(choice.sampling)
    except msgspec.MsgspecError:
        raise _no_attempt("the sampling parameters of a choice") from None
    if len(prompt) + sampling.max_tokens > limits.max_model_len:
        raise Incompatible("this worker cannot continue the request: its context length is too small")
    if not all(0 <= token < limits.vocab_size for token in (*prompt, *progress.ids)):
        raise _no_attempt("a token id")
    for count, logprobs in ((len(progress.ids), progress.logprobs), (len(prompt) - 1, progress.prompt_logprobs)):
        if logprobs and len(logprobs) != count:
            raise _no_attempt("the number of log-probabilities")
    return sampling, progress


def _no_attempt(what: str) -> BadRequest:
    return invalid_value(f"resume is no attempt of this request: {what} is wrong", "resume")


# Choices of a request that are ready to start: new ones, and ones that continue an earlier attempt.


@dataclass(frozen=True, slots=True)
class StartingChoice:
    """Choice that is ready to start."""

    prompt: Prompt
    sampling: Sampling
    output: ChoiceOutput
    emitted: tuple[int, ...] | None = None
    """Output tokens of an earlier attempt; None for a new choice."""
    replayed: Sequence[ChoicePiece] = ()
    """Pieces of an earlier attempt."""

    @property
    def engine_sampling(self) -> Sampling:
        """Sampling parameters for the engine. Log-probabilities of the prompt came with the first token."""
        return msgspec.structs.replace(self.sampling, prompt_logprobs=None) if self.emitted else self.sampling


def new_choices(model: Model, request: GenerationRequest, prompts: Sequence[Prompt]) -> list[StartingChoice]:
    """Return the choices of a new request, grouped by prompt.

    Raises:
        BadRequest: A prompt does not fit the model.
    """
    limits = model.limits
    most_tokens = token_limits(request, [prompt.ids for prompt in prompts], limits)
    choices = []
    for prompt, limit in zip(prompts, most_tokens, strict=True):
        for index, seed in enumerate(seeds_of(request.seed, request.n)):
            output = ChoiceOutput(model.tokenizer, prompt, request, counts_prompt=index == 0)
            sampling = sampling_of(request, limit, seed, limits, prompt.grammar)
            choices.append(StartingChoice(prompt, sampling, output))
    return choices


def continued_choices(
    model: Model,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    earlier: Sequence[tuple[Sampling, contract.ChoiceProgress]],
) -> list[StartingChoice]:
    """Return the choices that continue an earlier attempt, whose output is replayed.

    Run it outside the event loop, because a long output takes longer than a millisecond.

    Raises:
        BadRequest: The progress is no output of the request.
    """
    made = request.n
    choices = []
    for index, (sampling, progress) in enumerate(earlier):
        prompt = prompts[index // made]
        output = ChoiceOutput(model.tokenizer, prompt, request, progress.counters, counts_prompt=index % made == 0)
        replayed = output.replay(progress, FinishRule.of(sampling, model.loaded.eos_token_ids))
        choices.append(StartingChoice(prompt, sampling, output, progress.ids, replayed))
    return choices


# One generation: converts the token stream of one `Submit` into pieces of text.


class RequestObserver(Protocol):
    """Observer of one request: receives every message in order, then ``end`` once."""

    def process(self, tokens: Tokens) -> None:
        """Process one message of the request."""
        ...

    def end(self, finish_reason: str | None, *, moved: bool = False) -> None:
        """Process the end of the request.

        Args:
            finish_reason: ``stop`` or ``length``; None if the request was cancelled or failed.
            moved: Another worker continues the request.
        """
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """Part of the output of a generation: tokens that the engine sent, and the piece that they add."""

    index: int
    """Number of output tokens before these."""
    count: int
    """Number of the tokens that belong to the output; the others are behind a stop string."""
    tokens: Tokens
    piece: ChoicePiece


class Generation:
    """One choice for one prompt. Call ``close`` in every case, because it frees the slot in the engine."""

    def __init__(
        self,
        stream: Stream | None,
        choice: StartingChoice,
        queue: AdmissionQueue,
        client: str,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        """Connect the parts.

        Args:
            stream: Tokens of the engine; None for a choice that an earlier attempt has finished.
            choice: The choice that is generated.
            queue: Queue in which a generation with a stream has a place.
            client: Name of the request's API key, which holds the place.
            observers: Observers of the request.
        """
        self._stream = stream
        self.output = choice.output
        """Converter of the tokens, with the counts so far."""
        self.sampling = choice.sampling
        self.replayed = choice.replayed
        """Pieces of an earlier attempt on another worker."""
        self._queue, self._client, self._observers = queue, client, observers

    async def outputs(self, *, one_by_one: int = 0) -> AsyncIterator[Output]:
        """Yield the output as it arrives, also parts that do not change the response yet.

        Args:
            one_by_one: Number of output tokens up to which one part is yielded for every token. Later ones have one for
                every message of the engine.

        Raises:
            EngineFailed: The engine ended the request with an error, or it is gone.
            DeadlineExceeded: The deadline of the request passed before its end.
            QueueTimedOut: The request waited too long for a place in the batch.
        """
        if self._stream is None:
            return
        try:
            async for message in self._stream:
                self._observe(message)
                for tokens in split(message) if self.output.length < one_by_one else (message,):
                    index = self.output.length
                    piece = self.output.push(tokens)
                    yield Output(index, self.output.length - index, tokens, piece)
                    if piece.finish_reason:
                        return
        except EngineGone as error:
            raise EngineLost(f"the engine is gone: {error}") from None

    async def whole(self) -> FinishedChoice:
        """Return the finished choice. Raises the same errors as ``outputs``."""
        return self.choice([output.piece async for output in self.outputs() if output.piece.is_shown])

    def choice(self, pieces: Sequence[ChoicePiece]) -> FinishedChoice:
        """Return the finished choice, with the pieces of this attempt after those of earlier ones."""
        every = [*self.replayed, *pieces]
        return FinishedChoice(
            text="".join(piece.text for piece in every),
            finish_reason=every[-1].finish_reason or "stop",
            statistics=self.output.statistics,
            scored=tuple(one for piece in every for one in piece.scored),
        )

    def close(self, *, moved: bool = False) -> None:
        """Free the slot in the engine and notify the observers. Further calls have no effect.

        Args:
            moved: Another worker continues the request.
        """
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close(stopped=self.output.finish_reason is not None)
        for observer in self._observers:
            observer.end(self.output.finish_reason, moved=moved)
        self._queue.record_end(time.monotonic(), self._client)

    def _observe(self, tokens: Tokens) -> None:
        """Pass a message to the observers. Raise the error with which the engine ended the request, if it did."""
        for observer in self._observers:
            observer.process(tokens)
        if tokens.finish in ("error", "abort"):
            raise EngineFailed(tokens.error or "the engine ended this request")
        if tokens.finish == "deadline":
            raise DeadlineExceeded("the deadline of this request passed before it was complete; see X-Request-Timeout")
        if tokens.finish == "queue_timeout":
            raise QueueTimedOut(
                "this request waited too long for a place in the batch; try again later",
                retry_after_seconds=self._queue.wait_seconds(1, time.monotonic()),
            )


def submit_of(choice: StartingChoice, task: str, terms: RequestTerms, salt: str) -> Submit:
    """Return the message that starts a choice in the engine. ``salt`` is that of its cached prefix."""
    return Submit(
        request_id=uuid.uuid4().hex,
        prompt=tuple(choice.prompt.ids),
        sampling=choice.engine_sampling,
        task=task,
        arrival_seconds=time.monotonic(),
        deadline_seconds=terms.deadline_seconds,
        queue_deadline_seconds=terms.queue_deadline_seconds,
        client=terms.client,
        weight=terms.weight,
        cache_salt=salt,
        emitted=choice.emitted,
        blocks_at=terms.blocks_at,
    )
