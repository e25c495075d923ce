"""Makes small engines and their folders importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "worker" / "engine" / "support"))
