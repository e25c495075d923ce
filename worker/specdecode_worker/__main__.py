"""Command line entry point ``specdecode-worker COMMAND``: parses the flags and runs one module of ``commands``.

The module of a command is imported only when the command runs, so that ``pull`` needs no torch and ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module

COMMANDS = {
    "serve": "OpenAI-compatible server over the engine",
    "generate": "text for prompts, with the engine alone",
    "pull": "fetch a model into the cache and check it",
    "check": "whether target and draft fit each other and the memory",
    "bench": "speculation against plain decoding, in one run",
    "eval": "acceptance of a draft by domain and depth",
    "train": "an EAGLE-3 head for a target, from what the target itself says",
    "capture": "retention of captured requests, and their deletion by user",
    "distill": "a better draft out of captured traffic, and a verdict on it",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 1 for an error of the run, 2 for wrong usage."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] not in COMMANDS:
        return _usage(words)
    if os.getpid() == 1:
        # The kernel ignores SIGTERM for the first process of a container that has no handler, so a pod that is deleted
        # while its command is imported would last until the end of its grace period. Commands set their own handlers.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    command = import_module(f"specdecode_worker.commands.{words[0]}")
    parser = argparse.ArgumentParser(f"specdecode-worker {words[0]}", description=COMMANDS[words[0]])
    command.add_arguments(parser)
    code: int = command.run(parser.parse_args(words[1:]))
    return code


def _usage(words: list[str]) -> int:
    asked = bool(words) and words[0] in ("-h", "--help")
    lines = ["usage: specdecode-worker COMMAND [--help]", ""]
    lines += [f"  {name:9} {text}" for name, text in COMMANDS.items()]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
