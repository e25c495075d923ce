"""Environments of clients that others wrote, and the site that they ask: a real worker with a router before it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from specdecode_worker.contract import Plan, TreeShape
from support.worker_process import RouterProcess, WorkerProcess

ROOT = Path(__file__).parents[2]
SECONDS = 600


@dataclass
class Site:
    """Worker, and a router before it."""

    worker: WorkerProcess
    router: RouterProcess
    version: int = 0

    @property
    def drafts(self) -> int:
        """Number of drafts so far."""
        return self.worker.report().drafts

    def push(self, shape: str) -> None:
        """Draft this shape in every step from now on. The guard is off: it would end speculation on a busy machine."""
        self.version += 1
        plan = Plan(version=self.version, initial=TreeShape.parse(shape), max_depth=4, top_k=2, explore=0, guard=False)
        self.worker.put_plan(plan)


@dataclass
class ClientRunner:
    """Runner of programs in the environments of clients, offline and in a folder of its own."""

    folder: Path

    def run(self, client: str, program: str, *words: str, **variables: str) -> None:
        """Run ``bin/PROGRAM`` of a client's environment. Fail with its output if it fails."""
        folder = str(self.folder)
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "HF_HOME": folder, "NO_COLOR": "1"}
        command = [str(environment_of(client) / "bin" / program), *words]
        ended = subprocess.run(
            command, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=SECONDS
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}"


def environment_of(client: str) -> Path:
    """Return the virtual environment of a client, made from its hashed requirement file if that has changed."""
    requirements, folder = ROOT / "requirements/clients" / f"{client}.txt", ROOT / ".tools/clients" / client
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    made_from = folder / "made-from"
    if not made_from.exists() or made_from.read_text() != digest:
        uv = str(ROOT / ".tools/bin/uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
        install = [uv, "pip", "install", "--quiet", "--require-hashes", "--python", str(folder / "bin/python")]
        subprocess.run([*install, "--requirement", str(requirements)], check=True)
        made_from.write_text(digest)
    return folder
