"""Rendering of chat templates in processes of their own, and encoding of long texts in threads."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, TypeVar

from specdecode_worker.models.chat_template import ChatTemplate, Message
from specdecode_worker.models.errors import TemplateRefused
from specdecode_worker.server import template_process
from specdecode_worker.server.errors import ServerError, Unavailable
from specdecode_worker.server.tokenizer import Tokenizer

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
        self._close = weakref.finalize(self, _end, self._process, self._channel, pipe)
        self._limit_seconds = _START_SECONDS
        with contextlib.suppress(OSError):  # a process that ended at its start is noticed at the first rendering
            self._channel.settimeout(_START_SECONDS)
            sources = {"source": template.source, "tool_source": template.tool_source}
            template_process.send_frame(self._channel, {**sources, "special_tokens": dict(template.special_tokens)})

    def render(self, conversation: Mapping[str, Any]) -> str:
        """Render one conversation.

        The renderer is unusable if ``ended`` is true after an error.

        Raises:
            TemplateRefused: The template failed on these messages, or took too much processor time for them.
            Unavailable: The process ended, or did not answer in time.
        """
        self._channel.settimeout(self._limit_seconds)
        try:
            template_process.send_frame(self._channel, conversation)
            answer = template_process.receive_frame(self._channel)
        except (OSError, EOFError):
            self.close()
            raise self._loss() from None
        except (ValueError, RecursionError) as error:
            self.close()
            raise TemplateRefused(f"the messages or chat_template_kwargs cannot be rendered: {error}") from None
        self._limit_seconds = _WAIT_SECONDS
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        return str(answer["text"])

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

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render the prompt text of a conversation, like ``ChatTemplate.render`` but within limits.

        Run it in a thread: it blocks until a process is free and has answered.

        Raises:
            TemplateRefused: The template failed on these messages, or took too much processor time or memory for them.
            Unavailable: No process can be started, or the process ended or did not answer in time.
        """
        conversation = {
            "messages": messages,
            "tools": tools,
            "variables": variables,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
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


def _end(process: subprocess.Popen[bytes], channel: socket.socket, pipe: io.FileIO) -> None:
    """End a process and wait for it. A process that the kernel has ended already keeps its exit status."""
    channel.close()
    deadline = time.monotonic() + 0.05
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
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
