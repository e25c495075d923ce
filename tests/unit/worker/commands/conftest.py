"""Import path of the helper module ``small_folders``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "support"))
