"""Command ``simulate``: run the simulator with the deployment's spec and measurements."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdecode_operator.errors import PluginError
from specdecode_operator.simulator_program import INSTALL_SIMULATOR, simulator_command
from specdecode_operator.state.learned import LearnedState


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
    command = simulator_command()
    if command is None:
        raise PluginError(INSTALL_SIMULATOR)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.json"
        file.write_text(json.dumps(document(resource, learned)))
        rest = [flag for flag in flags if flag != "--"]
        return subprocess.run([*command, "--deployment", str(file), *rest]).returncode
