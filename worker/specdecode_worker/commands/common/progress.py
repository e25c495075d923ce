"""Progress of commands, on standard error."""

from __future__ import annotations

import sys


def print_progress(line: str) -> None:
    """Print a line to standard error at once."""
    print(line, file=sys.stderr, flush=True)
