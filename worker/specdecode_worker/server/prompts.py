"""Prompts of requests: rendered, encoded, checked for length, and with their grammars."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from specdecode_worker.core.messages import Logprobs
from specdecode_worker.models.chat_template import ChatTemplate
from specdecode_worker.models.errors import TemplateRefused, TokenizerProblem
from specdecode_worker.server import template_process
from specdecode_worker.server.admission import ModelLimits, token_limit, token_limits, truncated
from specdecode_worker.server.errors import BadRequest, ServerError, TooManyWaiting, Unavailable, invalid_value
from specdecode_worker.server.grammars import AnswerGrammars
from specdecode_worker.server.requests import (
    ChatRequest,
    CompletionRequest,
    ConversationRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from specdecode_worker.server.responses import ScoredToken
from specdecode_worker.server.tools import Tokenizer

# Tokenized prompts of completion and chat requests, with the text to echo.

# Tokens of an echo between two checks whether the client still waits: some milliseconds of work.
_TOKENS_PER_CHECK = 256


@dataclass(frozen=True, slots=True)
class Echo:
    """Text of an echoed prompt.

    ``offsets`` has the character position of each token; empty unless log-probabilities are requested.
    """

    text: str
    offsets: tuple[int, ...] = ()

    def scored(self, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> tuple[ScoredToken, ...]:
        """Return the prompt tokens with their log-probabilities, which the first token does not have.

        Args:
            ids: Token ids of the prompt.
            logprobs: Log-probabilities of all tokens but the first.
        """
        places = zip(ids, self.offsets, (None, *logprobs), strict=True)
        return tuple(ScoredToken(token, offset, logprob) for token, offset, logprob in places)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokenized prompt.

    ``echo`` is set only if the client requests it. ``opening`` is the text of the first user turn of a chat, or the
    whole prompt of a completion. ``grammar`` is the grammar that the answer follows; empty for none.
    """

    ids: Sequence[int]
    echo: Echo | None = None
    opening: str = ""
    grammar: str = ""


def completion_prompts(
    tokenizer: Tokenizer, body: CompletionRequest, limits: ModelLimits, stopped: threading.Event
) -> list[Prompt]:
    """Tokenize the prompts of a completion request and check them, before the positions of an echo are computed.

    Run it outside the event loop, because a long prompt takes milliseconds.

    Raises:
        BadRequest: A prompt does not fit the model.
        TextTooLong: A prompt has far more tokens than the context.
        TextWorkStopped: ``stopped`` was set.
    """
    all_ids: list[list[int]] = []
    special, context = body.add_special_tokens, limits.max_model_len
    for given in body.prompt:
        if isinstance(given, str):
            ids = encode_bounded(tokenizer, given, context, stopped, add_special_tokens=special)
        else:
            ids = given
        ids = truncated(body, ids, limits)
        token_limit(body, ids, limits)
        all_ids.append(ids)
    token_limits(body, all_ids, limits)
    return prompts_of_ids(tokenizer, body, all_ids, stopped)


def prompts_of_ids(
    tokenizer: Tokenizer, body: CompletionRequest, all_ids: Sequence[Sequence[int]], stopped: threading.Event
) -> list[Prompt]:
    """Return the prompts of a completion request, of which the token ids are known.

    Raises:
        TextWorkStopped: ``stopped`` was set.
    """
    prompts = []
    for given, ids in zip(body.prompt, all_ids, strict=True):
        shown = given if body.truncate_prompt_tokens is None else list(ids)
        echo = _echo(tokenizer, ids, shown, body, stopped) if body.echo else None
        prompts.append(Prompt(ids, echo, given if isinstance(given, str) else " ".join(map(str, ids))))
    return prompts


def chat_prompt(
    tokenizer: Tokenizer, text: str, body: ChatRequest, limits: ModelLimits, stopped: threading.Event
) -> Prompt:
    """Tokenize a conversation that is rendered to ``text``.

    Raises:
        TextTooLong: The text has far more tokens than the context.
        TextWorkStopped: ``stopped`` was set.
    """
    said = [message.text for message in body.messages if message.role == "user"] or [text]
    special = body.add_special_tokens
    ids = encode_bounded(tokenizer, text, limits.max_model_len, stopped, add_special_tokens=special)
    return Prompt(truncated(body, ids, limits), opening=said[0])


def _echo(
    tokenizer: Tokenizer, ids: Sequence[int], given: str | list[int], body: CompletionRequest, stopped: threading.Event
) -> Echo:
    """Return the echo of a prompt: a text as it was given, or the text of token ids.

    With log-probabilities the echo is the text of the tokens, in which their offsets are. Special tokens that the given
    text has are part of it; those that the tokenizer added are not.
    """
    if isinstance(given, str) and body.logprobs is None:
        return Echo(given)
    shown, before, skip_special = ids, 0, body.skip_special_tokens
    if isinstance(given, str) and any(tokenizer.is_dropped(token, skip_special_tokens=True) for token in ids):
        shown, skip_special = tokenizer.encode(given, add_special_tokens=False), False
        starts = range(len(ids) - len(shown) + 1)
        before = next((at for at in starts if list(ids[at : at + len(shown)]) == shown), 0)
    # The output completes a character that is incomplete at the end of the prompt.
    decode = tokenizer.decode if body.max_tokens == 0 else tokenizer.decode_complete
    text = decode(shown, skip_special_tokens=skip_special)
    if body.logprobs is None:
        return Echo(text)
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip_special)
    offsets, length = [0] * before, 0
    for index, token in enumerate(shown):
        if index % _TOKENS_PER_CHECK == 0:
            check_stopped(stopped)
        offsets.append(length)
        length += len(detokenizer.push(token))
    return Echo(text, (*offsets[: len(ids)], *[len(text)] * (len(ids) - len(offsets))))


# Work on the texts of requests outside the event loop: rendering, tokenization, echoes and detokenization.

Replayed = TypeVar("Replayed")

# Characters of all texts that wait for a thread or are worked on, of up to four bytes each.
_MAX_WAITING_CHARACTERS = 32 * 1024 * 1024
# Longest time that a request waits for its grammar. Bounds of the compiler keep a compilation far below it.
_GRAMMAR_SECONDS = 10.0


class PromptPreparation:
    """Preparation of the prompts of one model. A cancelled call stops its work.

    Answers to prompts can follow a grammar, which is compiled here too, so that the engine can use it.

    All methods raise BadRequest for a request that can never be served, TooManyWaiting if too much text waits for a
    thread, and Unavailable after ``close``.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, grammars: AnswerGrammars) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._limits = limits
        self._threads = TextThreads()
        self._characters = 0
        self._templates = None if tokenizer.template is None else TemplatePool(tokenizer.template)

    def start(self) -> None:
        """Start a process for the chat template, so that the first client does not wait for it."""
        if self._templates is not None:
            self._templates.start()

    def close(self) -> None:
        """End threads and processes. Work under way ends at its next check."""
        self._threads.close()
        if self._templates is not None:
            self._templates.close()

    async def prompts(self, body: CompletionRequest | ChatRequest) -> list[Prompt]:
        """Return the tokenized and checked prompts of a request, a conversation rendered, with their grammar."""
        prompts = [await self._chat(body)] if isinstance(body, ChatRequest) else await self._completion(body)
        if not body.prescribes_answer and not body.bad_words:
            return prompts
        try:
            async with asyncio.timeout(_GRAMMAR_SECONDS):
                grammar = await self._threads.run(Lane.GRAMMAR, lambda _stopped: self._grammars.compiled(body))
        except TimeoutError:
            raise TooManyWaiting("grammars take too long to compile now; try again later") from None
        return [replace(prompt, grammar=grammar) for prompt in prompts]

    async def _completion(self, body: CompletionRequest) -> list[Prompt]:
        characters = sum(map(len, body.prompt))
        work = partial(completion_prompts, self._tokenizer, body, self._limits)
        with self._errors("prompt"), self._counted(characters):
            return await self._threads.run(lane_of(characters), work)

    async def resumed(self, body: GenerationRequest, prompts: Sequence[Sequence[int]]) -> list[Prompt]:
        """Return the prompts of a request from their token ids, without rendering or tokenizing a text."""
        if not isinstance(body, CompletionRequest):
            return [Prompt(ids) for ids in prompts]
        work = partial(prompts_of_ids, self._tokenizer, body, prompts)
        with self._errors("prompt"):
            return await self._threads.run(lane_of(sum(map(len, prompts)) if body.echo else 0), work)

    async def replay(self, tokens: int, work: Callable[[], Replayed]) -> Replayed:
        """Return the result of ``work``, which detokenizes so many tokens of an earlier attempt."""
        with self._errors("resume"):
            return await self._threads.run(lane_of(tokens), lambda _stopped: work())

    async def _chat(self, body: ChatRequest) -> Prompt:
        with self._errors("messages"), self._counted(len(body.text)):
            text = await self._rendered(body)
            work = partial(chat_prompt, self._tokenizer, text, body, self._limits)
            return await self._threads.run(lane_of(len(text)), work)

    async def tokenize(self, body: TokenizeRequest | TokenizeChatRequest) -> list[int]:
        """Return the token ids of a text or of a conversation."""
        field, given = ("prompt", body.prompt) if isinstance(body, TokenizeRequest) else ("messages", body.text)
        with self._errors(field), self._counted(len(given)):
            text = given if isinstance(body, TokenizeRequest) else await self._rendered(body)
            special, longest = body.add_special_tokens, self._limits.max_model_len
            return await self._threads.run(
                lane_of(len(text)),
                lambda stopped: encode_bounded(self._tokenizer, text, longest, stopped, add_special_tokens=special),
            )

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        most = TOKENS_FACTOR * self._limits.max_model_len
        if len(ids) > most:
            raise BadRequest(f"a request may have at most {most} tokens, got {len(ids)}", param="tokens")
        if any(token >= self._tokenizer.vocab_size for token in ids):
            raise BadRequest(f"token ids must lie in 0..{self._tokenizer.vocab_size - 1}", param="tokens")
        with self._errors("tokens"):
            return await self._threads.run(
                lane_of(len(ids)), lambda _stopped: self._tokenizer.decode(ids, skip_special_tokens=False)
            )

    async def _rendered(self, body: ConversationRequest) -> str:
        self._tokenizer.chat_template()  # raises TokenizerProblem
        templates = self._templates
        assert templates is not None, "a model with a template has a pool for it"
        return await self._threads.run(Lane.TEMPLATE, lambda _stopped: templates.render(body.rendered()))

    @contextlib.contextmanager
    def _counted(self, characters: int) -> Iterator[None]:
        """Count a text while it waits for its work or is worked on.

        Raises:
            TooManyWaiting: The text would be one too many.
        """
        if self._characters and self._characters + characters > _MAX_WAITING_CHARACTERS:
            raise TooManyWaiting("too many long texts are waiting to be tokenized; try again later")
        self._characters += characters
        try:
            yield
        finally:
            self._characters -= characters

    @contextlib.contextmanager
    def _errors(self, field: str) -> Iterator[None]:
        """Translate the errors of work on texts into responses that name ``field``."""
        try:
            yield
        except TextTooLong:
            raise BadRequest(
                f"this model's maximum context length is {self._limits.max_model_len} tokens, and the text has more. "
                "Shorten it",
                param=field,
                code="context_length_exceeded",
            ) from None
        except (TemplateRefused, TokenizerProblem) as error:
            raise invalid_value(str(error), field) from None
        except TextWorkStopped:
            raise Unavailable("this worker is shutting down", code="draining") from None


# Rendering of chat templates in processes of their own, and encoding of long texts in threads.

log = logging.getLogger(__name__)

# Pool of processes that render the chat template of a model, with a time limit for each rendering.

MAX_PROCESSES = 2
"""Renderings at the same time. Each takes about a millisecond of a process."""
# Longest wait for the text of a rendering. It is longer than the limit of processor time, which a process on a busy
# machine reaches late.
_WAIT_SECONDS = 4.0
# Longest wait for the first text of a process, which includes the start of the interpreter.
_START_SECONDS = 20.0
# The process runs code that came with the weights: it gets no keys and tokens, only what an interpreter needs.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class _Renderer:
    """One process of the pool."""

    def __init__(self, template: ChatTemplate) -> None:
        self._channel, theirs = socket.socketpair()
        reading, writing = os.pipe()
        pipe = open(writing, "wb", buffering=0)  # noqa: SIM115 - open as long as the process shall live
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs, open(reading, "rb"):
            command = [sys.executable, "-m", template_process.__name__, str(reading)]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, pass_fds=(reading,))
        self._answers = self._channel.makefile("rb")
        self._close = weakref.finalize(self, _end, self._process, self._channel, self._answers, pipe)
        self._limit_seconds = _START_SECONDS
        with contextlib.suppress(OSError):  # a process that ended at its start is noticed at the first rendering
            self._channel.settimeout(_START_SECONDS)
            sources = {"source": template.source, "tool_source": template.tool_source}
            self._send({**sources, "special_tokens": dict(template.special_tokens)})

    def render(self, conversation: Mapping[str, Any]) -> str:
        """Render one conversation.

        The renderer is unusable if ``ended`` is true after an error.

        Raises:
            TemplateRefused: The template failed on these messages, or took too much processor time for them.
            Unavailable: The process ended, or did not answer in time.
        """
        self._channel.settimeout(self._limit_seconds)
        try:
            self._send(conversation)
            line = self._answers.readline()
            answer = json.loads(line) if line.endswith(b"\n") else None
        except OSError:
            answer = None
        except (ValueError, RecursionError) as error:
            self.close()
            raise TemplateRefused(f"the messages or chat_template_kwargs cannot be rendered: {error}") from None
        if answer is None:
            self.close()
            raise self._loss()
        self._limit_seconds = _WAIT_SECONDS
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        return str(answer["text"])

    def _send(self, content: Mapping[str, Any]) -> None:
        """Write a line. Raises OSError if the process is gone or does not read in time."""
        self._channel.sendall(json.dumps(content).encode() + b"\n")

    def kill(self) -> None:
        """End the process at once, also while another thread waits for its text."""
        self._process.kill()

    @property
    def ended(self) -> bool:
        """True once the process has ended."""
        return not self._close.alive

    def close(self) -> None:
        """End the process. Further calls have no effect."""
        self._close()

    def _loss(self) -> TemplateRefused | Unavailable:
        """Return the error for a process that has given no text. Only the limit of processor time is about the text."""
        if self._process.returncode == -signal.SIGPROF:
            return TemplateRefused(
                f"the model's chat template was stopped after {template_process.CPU_SECONDS} s of processor time; "
                "send fewer or shorter messages"
            )
        return _unavailable("its process ended or did not answer in time")


class TemplatePool:
    """Processes that render one chat template; started when they are needed. Safe to share between threads."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._renderers: weakref.WeakSet[_Renderer] = weakref.WeakSet()
        self._closed = False
        # None stands for a process that is not started yet. The last one returned is taken first, so that a single
        # client uses a single process.
        self._idle: queue.LifoQueue[_Renderer | None] = queue.LifoQueue()
        for _ in range(MAX_PROCESSES):
            self._idle.put(None)

    def start(self) -> None:
        """Start one process without waiting for it, so that the first client does not wait for its start."""
        self._idle.put(self._idle.get() or self._started())

    def render(self, conversation: Mapping[str, Any]) -> str:
        """Render the prompt text of a conversation, the arguments of ``ChatTemplate.render``, within limits.

        Run it in a thread: it blocks until a process is free and has answered.

        Raises:
            TemplateRefused: The template failed on these messages, or took too much processor time or memory for them.
            Unavailable: No process can be started, or the process ended or did not answer in time.
        """
        renderer = self._idle.get()
        try:
            renderer = renderer or self._started()
            if renderer is None:
                raise _unavailable("no process can be started; the log says why")
            return renderer.render(conversation)
        finally:
            # The next client does not wait for the start of the process.
            self._idle.put(self._started() if renderer is not None and renderer.ended else renderer)

    def _started(self) -> _Renderer | None:
        """Start a process; None if the system has none left, or after ``close``."""
        if self._closed:
            return None
        try:
            renderer = _Renderer(self._template)
        except OSError:
            log.exception("no process for the chat template can be started")
            return None
        self._renderers.add(renderer)
        return renderer

    def close(self) -> None:
        """End all processes, also those that render."""
        self._closed = True
        for one in list(self._renderers):
            one.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                if (renderer := self._idle.get_nowait()) is not None:
                    renderer.close()


def _unavailable(reason: str) -> Unavailable:
    return Unavailable(f"the chat template cannot be rendered now: {reason}. Try again", code="template_process")


def _end(process: subprocess.Popen[bytes], channel: socket.socket, answers: io.BufferedReader, pipe: io.FileIO) -> None:
    """End a process and wait for it. A process that the kernel has ended already keeps its exit status."""
    answers.close()
    channel.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.05)
    pipe.close()
    process.wait()


# Threads for work on texts, apart from the event loop: few of them, so that memory and processor time are bounded.

Result = TypeVar("Result")

SHORT_TEXT_CHARACTERS = 16 * 1024
"""Text up to which work is short: it takes some milliseconds, and does not wait behind longer work."""


class Lane(Enum):
    """Kind of work; each kind waits only for work of its own kind. The value is the number of threads."""

    SHORT = ("short", 2)
    LONG = ("long", 2)
    TEMPLATE = ("template", MAX_PROCESSES)
    GRAMMAR = ("grammar", 1)


def lane_of(characters: int) -> Lane:
    """Return the lane of work on a text, or on as many tokens."""
    return Lane.SHORT if characters <= SHORT_TEXT_CHARACTERS else Lane.LONG


class TextThreads:
    """Threads of all lanes. Work that waits for a thread holds no memory except its request."""

    def __init__(self) -> None:
        self._executors = {
            lane: ThreadPoolExecutor(lane.value[1], thread_name_prefix=f"text-{lane.value[0]}") for lane in Lane
        }
        self._running: set[threading.Event] = set()

    async def run(self, lane: Lane, work: Callable[[threading.Event], Result]) -> Result:
        """Run ``work`` in a thread of ``lane`` and return its result.

        ``work`` gets an event that is set when the caller is cancelled or the threads are closed; it checks the event
        between parts of its work. Work that has not begun by then never does.
        """
        stopped = threading.Event()
        self._running.add(stopped)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executors[lane], work, stopped)
        finally:
            stopped.set()
            self._running.discard(stopped)

    def close(self) -> None:
        """Drop the work that has not begun, and stop the other work at its next check, without waiting for it."""
        for stopped in self._running:
            stopped.set()
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)


# Tokenization of texts from clients: refused early if too long, and stopped between parts if the client is gone.

TOKENS_FACTOR = 2
"""A text is refused here if it has more than this many times the tokens of the context.

The tokens of a text's beginning are those of the whole text except for a few at the cut. Beginnings are measured, so
the factor leaves a margin of a whole context for the cut.
"""
# A text of natural language has about four characters per token, so a text that fits is mostly tokenized once.
_FIRST_CHARACTERS_PER_TOKEN = 4
_GROWTH = 2


class TextTooLong(ServerError):
    """Error for a text that has more than ``TOKENS_FACTOR`` times the tokens of the context."""


class TextWorkStopped(ServerError):
    """Error that ends the work on a text whose request was cancelled."""


def check_stopped(stopped: threading.Event) -> None:
    """Raise TextWorkStopped if ``stopped`` is set."""
    if stopped.is_set():
        raise TextWorkStopped


def encode_bounded(
    tokenizer: Tokenizer,
    text: str,
    max_model_len: int,
    stopped: threading.Event,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Tokenize a text in time and memory that depend on the context length and not on the text.

    Growing beginnings are tokenized, until one is too long or holds the whole text.

    Args:
        tokenizer: Tokenizer of the model.
        text: Text of a client.
        max_model_len: Context length in tokens.
        stopped: Set when the result is not needed any more.
        add_special_tokens: Add the special tokens of the tokenizer, such as BOS.

    Raises:
        TextTooLong: The text has more than ``TOKENS_FACTOR`` times ``max_model_len`` tokens.
        TextWorkStopped: ``stopped`` was set.
    """
    most = TOKENS_FACTOR * max_model_len
    size = _FIRST_CHARACTERS_PER_TOKEN * max_model_len
    while size < len(text):
        check_stopped(stopped)
        if len(tokenizer.encode(text[:size], add_special_tokens=False)) > most:
            raise TextTooLong
        size *= _GROWTH
    check_stopped(stopped)
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if len(ids) > most:
        raise TextTooLong
    return ids
