"""Makes ``fleet`` (workers whose truth is known) importable for the operator's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
