"""Entry point of ``specdecode-simulate`` and of ``python -m specdecode_simulator``."""

from __future__ import annotations

import sys

from specdecode_simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
