"""The Kubernetes API: the only module that speaks to it (beside kopf's own watch in handlers.py).

Requests go through the asyncio dynamic client by path: our kinds are few and fixed, so nothing is discovered and
an API server that is away at start does no harm. Foreign errors become ClusterError here, once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.dynamic import DynamicClient

from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from specdecode_operator.errors import ClusterError, Conflict, NotFound, Refused, Unavailable
from specdecode_operator.kube.applied import FIELD_MANAGER, Applied, ApplyCache, ours_digest, text_digest

PAGE = 500
_METADATA_LIST = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
_METADATA = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
REAPPLY_SECONDS = 60.0
"""An unchanged child is applied again after this long, which mends what somebody else did to it."""

log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """A kind of object and its path."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        root = "api" if "/" not in self.api_version else "apis"
        parts = [root, self.api_version, *(["namespaces", namespace] if namespace else []), self.plural]
        return "/" + "/".join([*parts, *([name] if name else []), *([subresource] if subresource else [])])


DEPLOYMENTS = Kind(f"{GROUP}/{VERSION}", KIND, PLURAL)
WORKLOADS = Kind("apps/v1", "Deployment", "deployments")
PODS = Kind("v1", "Pod", "pods")
SERVICES = Kind("v1", "Service", "services")
CONFIG_MAPS = Kind("v1", "ConfigMap", "configmaps")
SECRETS = Kind("v1", "Secret", "secrets")
EVENTS = Kind("v1", "Event", "events")
BUDGETS = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")

APPLIED = {kind.kind: kind for kind in (WORKLOADS, SERVICES, CONFIG_MAPS, BUDGETS)}
"""Kinds that are applied from manifests."""


PERMISSIONS: Mapping[tuple[str, str], frozenset[str]] = {
    (GROUP, "specdecodedeployments"): frozenset({"get", "list", "watch"}),
    (GROUP, "specdecodedeployments/status"): frozenset({"patch"}),
    ("apps", "deployments"): frozenset({"get", "list", "watch", "create", "patch"}),
    ("", "pods"): frozenset({"list", "watch", "patch", "delete"}),
    ("", "services"): frozenset({"get", "create", "patch"}),
    ("", "configmaps"): frozenset({"get", "create", "patch"}),
    ("", "secrets"): frozenset({"get", "create"}),
    ("", "events"): frozenset({"create"}),
    ("policy", "poddisruptionbudgets"): frozenset({"get", "create", "patch"}),
}
"""All that the operator may do, kopf's watch of our kind included: the chart's Role is compared with this."""


class KubeClient:
    """One connection to one API server."""

    def __init__(self, api: ApiClient, *, timeout_seconds: float = 10) -> None:
        self._api = api
        self._client = DynamicClient(api)
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self.applied = ApplyCache()

    @classmethod
    async def connect(cls, kubeconfig: str | None = None) -> KubeClient:
        """With the pod's service account, else with ``kubeconfig`` (default: the user's own)."""
        configuration = Configuration()
        try:
            config.load_incluster_config(configuration)
        except config.ConfigException:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        # The session would ask the environment for a proxy and netrc for a password, in a thread, at every request:
        # half of what a request takes.
        configuration.client_session_kwargs = {"trust_env": False}
        configuration.proxy = configuration.proxy or environment_proxy(configuration.host)
        return cls(ApiClient(configuration))

    async def close(self) -> None:
        await self._api.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """The object, or None when there is none. One that stands as it was applied need not be asked for again."""
        try:
            found = await self._request("get", kind.path(namespace, name))
        except NotFound:
            return None
        known = self.applied.get((kind.kind, namespace, name))
        if known is not None and ours_digest(found) == known.ours:
            known.at = time.monotonic()
        return found

    async def list(self, kind: Kind, namespace: str | None, *, labels: str) -> dict[str, Any]:
        """The List, with its resource version. ``namespace`` None lists all namespaces."""
        return await self._request("get", kind.path(namespace), label_selector=labels)

    async def pages(self, kind: Kind, namespace: str | None, *, labels: str) -> AsyncIterator[dict[str, Any]]:
        """Lists of metadata alone, page by page: ten thousand whole pods at once would be more than all else that the
        process needs. Each has the resource version to watch from."""
        token = None
        while token != "":
            page = await self._request(
                "get",
                kind.path(namespace),
                header_params=_METADATA_LIST,
                label_selector=labels,
                limit=PAGE,
                _continue=token,
            )
            yield page
            token = page["metadata"].get("continue", "")

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Conflict when the name is taken."""
        namespace = manifest["metadata"]["namespace"]
        return await self._request("post", kind.path(namespace), body=dict(manifest), field_manager=FIELD_MANAGER)

    async def apply(self, manifest: Mapping[str, Any]) -> None:
        """Server-side apply; skipped while the same text was applied less than a minute ago, and after that while
        nobody has touched the fields that are ours: a deployment at rest costs reads alone."""
        kind = APPLIED[manifest["kind"]]
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        text = text_digest(manifest)
        path, known = kind.path(namespace, name), self.applied.get((kind.kind, namespace, name))
        same = known is not None and known.text == text
        if known and same and (time.monotonic() - known.at < REAPPLY_SECONDS or await self._stands(path, known)):
            return
        found = await self._apply(path, manifest)
        self.applied[kind.kind, namespace, name] = Applied(text, ours_digest(found), time.monotonic())

    async def patch(self, kind: Kind, namespace: str, name: str, change: Mapping[str, Any]) -> None:
        """Merges ``change`` into what is there; what is gone stays gone."""
        with contextlib.suppress(NotFound):
            await self._request(
                "patch",
                kind.path(namespace, name),
                body=dict(change),
                content_type="application/merge-patch+json",
                field_manager=FIELD_MANAGER,
            )

    async def delete(self, kind: Kind, namespace: str, name: str) -> None:
        """What is gone already is no error."""
        with contextlib.suppress(NotFound):
            await self._request("delete", kind.path(namespace, name))

    async def apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Writes the whole status; fields that were ours and are missing now go."""
        body = {
            "apiVersion": DEPLOYMENTS.api_version,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": dict(status),
        }
        await self._apply(DEPLOYMENTS.path(namespace, name, "status"), body)

    def forget(self, namespace: str, name: str) -> None:
        """Applies a child again at the next look, whatever was applied last: it is gone."""
        self.applied.forget(namespace, name)

    async def watch(
        self, kind: Kind, namespace: str | None, *, labels: str, version: str
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """(type, metadata) from ``version`` on, until the server ends the stream. Raises ClusterError."""
        params = {"label_selector": labels, "resource_version": version, "watch": "true", "timeout_seconds": 300}
        timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=330)
        response = await self._raw("get", kind.path(namespace), timeout=timeout, header_params=_METADATA, **params)
        try:
            async for line in _lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise Unavailable(str(event["object"].get("message", event["object"])))
                yield event["type"], event["object"]
        except (TimeoutError, aiohttp.ClientError) as error:
            raise Unavailable(f"the watch of {kind.plural} ended: {error!r}") from error
        finally:
            response.close()

    async def _stands(self, path: str, known: Applied) -> bool:
        """Whether the object is there, its fields still ours; then that holds for another while."""
        try:
            found = await self._request("get", path, header_params=_METADATA)
        except NotFound:
            return False
        known.at = time.monotonic()
        return ours_digest(found) == known.ours

    async def _apply(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request(
            "patch",
            path,
            body=dict(body),
            content_type="application/apply-patch+yaml",
            field_manager=FIELD_MANAGER,
            force_conflicts=True,
        )

    async def _request(self, method: str, path: str, **params: Any) -> dict[str, Any]:
        response = await self._raw(method, path, timeout=self._timeout, **params)
        try:
            found: dict[str, Any] = await response.json()
            return found
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            raise Unavailable(f"{method} {path}: {error!r}") from error

    async def _raw(
        self,
        method: str,
        path: str,
        *,
        timeout: aiohttp.ClientTimeout,
        header_params: Mapping[str, str] | None = None,
        **params: Any,
    ) -> Any:
        try:
            # Lists of its own for every call: the client's defaults are shared between calls and would grow.
            return await self._client.request(
                method,
                path,
                serialize=False,
                query_params=[],
                header_params=dict(header_params or {}),
                _request_timeout=timeout,
                **params,
            )
        except ApiException as error:
            raise translated(error, f"{method} {path}") from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{method} {path}: {error!r}") from error


def environment_proxy(url: str) -> str | None:
    """The proxy that the environment names for ``url``, if any."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def translated(error: ApiException, what: str) -> ClusterError:
    """The ClusterError for an answer of the API server, with the server's own sentence."""
    message = f"{what}: {_sentence(error)}"
    if error.status == 404:
        return NotFound(message)
    if error.status == 409:
        return Conflict(message)
    if error.status in (400, 403, 405, 413, 415, 422):
        return Refused(message)
    return Unavailable(message)


def _sentence(error: ApiException) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length: aiohttp's own readline gives up on objects beyond its buffer."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
