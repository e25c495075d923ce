"""The entry point of the command files in hack/cluster: errors become one message and exit status 1."""

from __future__ import annotations

import sys
from collections.abc import Callable

from localcluster.errors import ClusterError
from localcluster.settings import Layout


def main(command: Callable[[Layout], object]) -> None:
    """Run one command; an answer of False is a failed check."""
    try:
        answer = command(Layout.from_environment())
    except ClusterError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to go on, or hack/cluster/down to undo")
    sys.exit(1 if answer is False else 0)
