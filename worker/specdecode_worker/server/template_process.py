"""Process that renders chat templates within limits of processor time and memory.

A template is code that came with the weights. It can loop without end inside one call that no thread can interrupt, so
the kernel limits it: the process ends if a rendering takes more processor time than allowed, and an allocation beyond
the memory limit fails. The process reads requests from a socket, which is its standard input, and writes the texts to
it. It ends when the other end of the socket is closed, and with its parent (`end_with`).

Each line is JSON. The first one has the template, each further one a conversation, which is answered by a line.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import sys
from typing import Any

from specdecode_worker.bound_process import end_with
from specdecode_worker.models.chat_template import ChatTemplate
from specdecode_worker.models.errors import TemplateRefused

CPU_SECONDS = 0.5
"""Processor time of one rendering. A long conversation takes some milliseconds."""
MEMORY_BYTES = 256 * 1024 * 1024
"""Address space of the process, of which the interpreter takes about 40 MB."""


def _answer(template: ChatTemplate, conversation: dict[str, Any]) -> dict[str, str]:
    """Render a conversation: {"text": ...}, or {"refused": reason}. The kernel ends the process at CPU_SECONDS."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        return {"text": template.render(**conversation)}
    except TemplateRefused as error:
        return {"refused": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Serve renderings until the channel is closed. The argument is the descriptor of a pipe for `end_with`."""
    end_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent drains first
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as channel, contextlib.suppress(ConnectionError):
        lines = channel.makefile("rb")
        template = None
        for line in lines:
            if template is None:
                template = ChatTemplate(**json.loads(line))
            else:
                channel.sendall(json.dumps(_answer(template, json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
