"""A real Prometheus server process on loopback with the chart's alert rules; it scrapes the targets of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from support.kube import ROOT, wait_for
from support.processes import free_ports

RULES = ROOT / "helm" / "specdecode" / "files" / "alerts.yaml"
EVERY = "3s"
"""Time between two scrapes, and between two evaluations of rules."""


@dataclass(frozen=True, slots=True)
class Target:
    """The only target of a job: its address ``host:port``, and the labels that a monitor of the chart would add."""

    job: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Prometheus:
    """HTTP API of one server."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=20)

    def ready(self) -> bool:
        return self._client.get("/-/ready").status_code == 200

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query.

        Raises:
            AssertionError: If it cannot be evaluated, with the message of Prometheus.
        """
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Return the alert rules with their health after the last evaluation."""
        groups = self._client.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def down(self) -> list[str]:
        """Return the address and error of every target that could not be scraped."""
        targets = self._client.get("/api/v1/targets").raise_for_status().json()["data"]["activeTargets"]
        return [f"{target['scrapeUrl']}: {target['lastError']}" for target in targets if target["health"] != "up"]


@contextmanager
def prometheus_over(programs: Path, folder: Path, targets: list[Target]) -> Iterator[Prometheus]:
    """Run a server for the duration of the block; every target was scraped once before the block starts."""
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(_config(targets)))
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [
        str(programs / "prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(f"http://{address}")
        wait_for("Prometheus is ready", prometheus.ready, timeout_s=30)
        wait_for("every target is scraped", lambda: prometheus.query("up == 1") and not prometheus.down(), timeout_s=30)
        yield prometheus
    finally:
        process.terminate()
        process.wait(20)


def _config(targets: list[Target]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY, "evaluation_interval": EVERY},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": target.job,
                "honor_labels": True,
                "static_configs": [{"targets": [target.address], "labels": dict(target.labels)}],
            }
            for target in targets
        ],
    }
