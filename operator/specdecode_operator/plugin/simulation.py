"""Command ``simulate``: run ``specdecode-operator simulate`` with the deployment's spec and measurements."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdecode_operator.errors import PluginError
from specdecode_operator.state.learned import LearnedState

PROGRAM = "specdecode-operator"


def document(resource: dict[str, Any], learned: LearnedState | None) -> dict[str, Any]:
    """Return the input of the simulator: the resource, and the operator's measurements under ``memory``."""
    metadata = {name: resource["metadata"][name] for name in ("namespace", "name", "uid")}
    return {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "metadata": metadata,
        "spec": resource["spec"],
        "status": resource.get("status") or {},
        "memory": learned.model_dump(mode="json", by_alias=True) if learned else None,
    }


def run_simulator(resource: dict[str, Any], learned: LearnedState | None, flags: Sequence[str]) -> int:
    """Run the simulator and return its exit code.

    Raises:
        PluginError: The simulator is not installed.
    """
    program = _program()
    if program is None or not _simulates(program):
        raise PluginError(
            f"`{PROGRAM} simulate` is not installed in the plugin's environment: pip install 'specdecode[operator]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.json"
        file.write_text(json.dumps(document(resource, learned)))
        rest = [flag for flag in flags if flag != "--"]
        return subprocess.run([program, "simulate", "--deployment", str(file), *rest]).returncode


def _program() -> str | None:
    """Return the program of this installation, else the one on PATH."""
    own = Path(sys.executable).parent / PROGRAM
    return str(own) if own.exists() else shutil.which(PROGRAM)


def _simulates(program: str) -> bool:
    result = subprocess.run([program, "simulate", "--help"], capture_output=True, text=True)
    return result.returncode == 0 and "--deployment" in result.stdout
