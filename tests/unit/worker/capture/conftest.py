"""Records of no model, for the files that hold them."""

from __future__ import annotations

import sys
from pathlib import Path

# `captured` serves the tests here; `redaction_hooks` is imported by name, as a user's hook is.
sys.path.insert(0, str(Path(__file__).parent / "support"))
