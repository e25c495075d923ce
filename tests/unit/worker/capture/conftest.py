"""Import path of the test records and of the redaction hooks."""

from __future__ import annotations

import sys
from pathlib import Path

# `captured` is imported by these tests; `redaction_hooks` is imported by name, like a user's hook.
sys.path.insert(0, str(Path(__file__).parent / "support"))
