"""``simulate``: hands the deployment's spec and recorded figures to ``specdecode-operator simulate``."""

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
    """What is handed over: the resource as it is, and what the operator remembers of it under ``memory``."""
    metadata = {name: resource["metadata"][name] for name in ("namespace", "name", "uid")}
    return {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "metadata": metadata,
        "spec": resource["spec"],
        "status": resource.get("status") or {},
        "memory": learned.model_dump(mode="json", by_alias=True) if learned else None,
    }


def hand_over(resource: dict[str, Any], learned: LearnedState | None, flags: Sequence[str]) -> int:
    """The simulator's exit code. Raises PluginError where it is not installed."""
    program = _program()
    if program is None or not _simulates(program):
        raise PluginError(
            f"`{PROGRAM} simulate` is not installed beside this program: pip install 'specdecode[operator]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.json"
        file.write_text(json.dumps(document(resource, learned)))
        rest = [flag for flag in flags if flag != "--"]
        return subprocess.run([program, "simulate", "--deployment", str(file), *rest]).returncode


def _program() -> str | None:
    """The one of this installation before any other on PATH."""
    own = Path(sys.executable).parent / PROGRAM
    return str(own) if own.exists() else shutil.which(PROGRAM)


def _simulates(program: str) -> bool:
    asked = subprocess.run([program, "simulate", "--help"], capture_output=True, text=True)
    return asked.returncode == 0 and "--deployment" in asked.stdout
