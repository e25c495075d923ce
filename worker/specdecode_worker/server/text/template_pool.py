"""Pool of processes that render the chat template of a model, with a time limit for each rendering."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from specdecode_worker.models.errors import TemplateRefused
from specdecode_worker.models.vocabulary.chat_template import ChatTemplate, Message
from specdecode_worker.server.errors import Unavailable
from specdecode_worker.server.text import template_process

MAX_PROCESSES = 2
"""Renderings at the same time. Each takes about a millisecond of a process."""
# Longest wait for the text of a rendering. It is longer than the limit of processor time, which a process on a busy
# machine reaches late.
_WAIT_SECONDS = 4.0
# Longest wait for the first text of a process, which includes the start of the interpreter.
_START_SECONDS = 20.0
# The process runs code that came with the weights: it gets no keys and tokens, only what an interpreter needs.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")

log = logging.getLogger(__name__)


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
