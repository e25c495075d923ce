"""Everything that can go wrong here, in words for the person at the terminal.

ClusterError              the message says what to do
├── CommandFailed         a program that we called exited non-zero
├── DaemonDied            a daemon that we started ended; the message carries the end of its log
└── TimedOut              something did not become ready in its time
"""

from __future__ import annotations


class ClusterError(Exception):
    """Stops a command; `commands.main` prints the message and exits 1."""


class CommandFailed(ClusterError):
    """A program that we called exited non-zero."""


class DaemonDied(ClusterError):
    """A daemon ended while we waited for it."""


class TimedOut(ClusterError):
    """A condition did not hold in its time."""
