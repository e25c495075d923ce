"""Makes ``fleet`` (workers whose truth is known) importable for the operator's tests."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "support"))

# A busy machine is no failure of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
