"""Liveness and readiness of the operator's process, over HTTP.

The process is live while its event loop answers. It is ready once every cache has its first list and the API server
grants all rights, so that a rollout of an operator that can do nothing goes no further. A standby is ready too. What
was ready stays so: without an API server no replica is better than another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from specdecode_operator.controller.children import Caches
from specdecode_operator.errors import ClusterError, Refused
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import DEPLOYMENTS, JOBS, PERMISSIONS

RETRY_SECONDS = 2.0
"""Time between two questions for the rights, while one is missing."""
OPTIONAL = frozenset({("batch", JOBS.plural)})
"""Resources without which an operator serves, but trains no drafts."""

log = logging.getLogger(__name__)


class Readiness:
    """Readiness of a replica: the first lists of its caches, and its rights."""

    def __init__(self, client: KubeClient, caches: Caches, namespaces: Sequence[str]) -> None:
        """Prepare the checks.

        Args:
            client: Client of the API server.
            caches: Caches of the replica.
            namespaces: Namespaces in which rights are needed.
        """
        self._client = client
        self._caches = caches
        self._namespaces = tuple(namespaces)
        self._rights = "rights: not known yet"
        """What is missing of the rights; empty if nothing is."""
        self._was_ready = False
        self.has_kind = asyncio.Event()
        """Set once our own kind can be read. kopf looks for it once, and never serves one that comes later."""

    def problem(self) -> str:
        """Return what is missing; empty if the replica is, or once was, ready."""
        missing = "" if self._was_ready else "; ".join(filter(None, (self._caches.problem(), self._rights)))
        self._was_ready = not missing
        return missing

    async def run(self) -> None:
        """Ask for the rights until they are there."""
        while self._rights:
            unread = await self._unread_kind()
            if not unread:
                self.has_kind.set()
            problem = await self._missing_rights() or unread
            if problem != self._rights:
                log.log(logging.WARNING if problem else logging.INFO, "%s", problem or "all rights are there")
            self._rights = problem
            await asyncio.sleep(RETRY_SECONDS if problem else 0)

    async def _missing_rights(self) -> str:
        try:
            for namespace in self._namespaces:
                review = await self._client.own_rules(namespace)
                lacks = [] if review.get("incomplete") else list(missing_rights(review.get("resourceRules") or []))
                if lacks:
                    return f"rights in {namespace}: {', '.join(lacks)} missing; see the chart's rbac.yaml"
        except Refused as error:
            log.warning("the rights cannot be asked for: %s", error)
        except ClusterError as error:
            return str(error)
        return ""

    async def _unread_kind(self) -> str:
        """Return why our own kind cannot be read, as without the CRD; empty if it can."""
        try:
            await self._client.list(DEPLOYMENTS, self._namespaces[0], limit=1)
        except ClusterError as error:
            return str(error)
        return ""


def missing_rights(rules: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the needed rights that rules of the API server do not grant, such as ``patch pods``."""
    granted = [rule for rule in rules if not rule.get("resourceNames")]
    for (group, resource), verbs in sorted(PERMISSIONS.items()):
        for verb in sorted(verbs):
            wanted = {"apiGroups": group, "resources": resource, "verbs": verb}
            if (group, resource) not in OPTIONAL and not any(_covers(rule, wanted) for rule in granted):
                yield f"{verb} {resource}"


def _covers(rule: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    return all({"*", value} & {*(rule.get(field) or ())} for field, value in wanted.items())


async def serve_probes(address: str, port: int, readiness: Readiness) -> web.AppRunner:
    """Serve ``/healthz`` and ``/ready``. The result's ``cleanup`` stops it.

    Raises:
        OSError: The port is taken.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        problem = readiness.problem()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    application = web.Application()
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/ready", ready)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    return runner
