"""Command line entry point ``specdecode-worker COMMAND``: parses the flags and runs one module of ``commands``.

Flags are in ``commands/arguments.py``, which needs no torch. The module of a command is imported when the command runs.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from specdecode_worker.commands.arguments import COMMANDS, new_parser


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 1 for an error of the run, 2 for wrong usage."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] not in COMMANDS:
        return _usage(words)
    if os.getpid() == 1:
        # The kernel ignores SIGTERM for the first process of a container that has no handler, so a pod that is deleted
        # while its command is imported would last until the end of its grace period. Commands set their own handlers.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    args = new_parser(words[0]).parse_args(words[1:])
    code: int = import_module(f"specdecode_worker.commands.{words[0]}").run(args)
    return code


def _usage(words: list[str]) -> int:
    asked = bool(words) and words[0] in ("-h", "--help")
    lines = ["usage: specdecode-worker COMMAND [--help]", ""]
    lines += [f"  {name:9} {text}" for name, (text, _) in COMMANDS.items()]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
