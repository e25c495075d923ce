"""The operator as a process: started, measured from outside, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from scale.api_server import ApiServer, free_port


class Operator:
    """One ``specdecode-operator run`` on loopback."""

    def __init__(self, server: ApiServer, proxy: str, folder: Path, poll_seconds: float, concurrency: int) -> None:
        self._metrics = free_port()
        settings = {
            "WORKER_PROXY": proxy,
            "LISTEN_ADDRESS": "127.0.0.1",
            "PORT_HEALTH": str(free_port()),
            "PORT_METRICS": str(self._metrics),
            "POLL_SECONDS": str(poll_seconds),
            "CONCURRENCY": str(concurrency),
        }
        environment = {
            **os.environ,
            "KUBECONFIG": str(server.kubeconfig),
            **{f"SPECDECODE_OPERATOR_{name}": value for name, value in settings.items()},
        }
        command = [str(Path(sys.executable).parent / "specdecode-operator"), "run"]
        with (folder / "operator.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def reconciled(self) -> int:
        """Deployments that this process has looked at and planned for."""
        return sum(line.startswith("specdecode_operator_plan_version{") for line in self._scraped())

    def looks(self) -> float:
        name = 'specdecode_operator_reconciles_total{outcome="success"}'
        return sum(float(line.rpartition(" ")[2]) for line in self._scraped() if line.startswith(name))

    def resident_mib(self) -> tuple[float, float]:
        """Resident memory now, and the most it ever was."""
        found = {}
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = int(value.split()[0]) / 1024
        return found["VmRSS"], found["VmHWM"]

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _scraped(self) -> list[str]:
        """The two metrics that are looked at: all series of a thousand deployments take the operator half a second."""
        names = "specdecode_operator_plan_version", "specdecode_operator_reconciles_total"
        query = "&".join(f"name[]={name}" for name in names)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics?{query}", timeout=10) as answer:
                return bytes(answer.read()).decode().splitlines()
        except (urllib.error.URLError, OSError):
            return []
