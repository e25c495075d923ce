"""Lookup of the simulator, which is a package of its own and not part of the operator's image."""

from __future__ import annotations

import importlib.util
import shutil
import sys

INSTALL_SIMULATOR = (
    "the simulator is not installed; in a checkout of the project: pip install . ./simulator (docs/dev/simulator.md)"
)
_MODULE, _PROGRAM = "specdecode_simulator", "specdecode-simulate"


def simulator_command() -> list[str] | None:
    """Return the command that starts the simulator: of this environment, else of PATH. None if there is none."""
    if _is_importable(_MODULE):
        return [sys.executable, "-m", _MODULE]
    program = shutil.which(_PROGRAM)
    return None if program is None else [program]


def _is_importable(module: str) -> bool:
    """Return whether this interpreter finds the module, without an import of it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # Raised for a module that is set to None in sys.modules, which blocks its import.
        return False
