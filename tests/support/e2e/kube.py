"""A namespace of the cluster: kubectl bound to it, and connections to its Services and pods."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from support.kube import Cluster, KubectlError, Manifest


@dataclass(frozen=True, slots=True)
class Namespace:
    """kubectl bound to one namespace."""

    cluster: Cluster
    name: str

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        return self.cluster.kubectl(*words, namespace=self.name, stdin=stdin, timeout_s=timeout_s)

    def refusal(self, *words: str, stdin: str | None = None) -> str:
        """Run a command that must fail and return kubectl's error message."""
        try:
            said = self.kubectl(*words, stdin=stdin)
        except KubectlError as error:
            return str(error)
        raise AssertionError(f"kubectl {' '.join(words)} should have failed; it said: {said}")

    def get(self, kind: str, name: str) -> Manifest:
        return self.cluster.get(kind, name, self.name)

    def list(self, kind: str, selector: str = "") -> list[Manifest]:
        return list(self.cluster.list(kind, selector, self.name))

    def apply(self, manifest: Manifest) -> None:
        self.cluster.apply(manifest, namespace=self.name)

    def exec(self, pod: str, *command: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        flags = ["--stdin"] if stdin is not None else []
        return self.kubectl("exec", pod, *flags, "--", *command, stdin=stdin, timeout_s=timeout_s)

    @contextmanager
    def reach(self, kind: str, name: str, port: int) -> Iterator[str]:
        """Yield the base URL of a Service or a pod while the block runs.

        On the machine of the local cluster, Service and pod addresses are routed, so that requests really pass through
        the Service. Elsewhere the port is forwarded.
        """
        if self.cluster.local:
            manifest = self.get(kind, name)
            address = manifest["spec"]["clusterIP"] if kind == "service" else manifest["status"]["podIP"]
            yield f"http://{address}:{port}"
        else:
            with self._forwarded(f"{kind}/{name}", port) as local:
                yield f"http://127.0.0.1:{local}"

    @contextmanager
    def _forwarded(self, target: str, port: int) -> Iterator[int]:
        command = [self.cluster.program, "--namespace", self.name, "port-forward", target, f":{port}"]
        environment = dict(self.cluster.environment)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            line = process.stdout.readline()
            match = re.search(r"127\.0\.0\.1:(\d+)", line)
            assert match, f"kubectl port-forward {target}: {line!r}"
            yield int(match[1])
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
