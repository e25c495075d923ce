"""Test settings: makes ``small_engine`` importable, and disables Hypothesis deadlines because of busy machines."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
