"""Client of the API server: connection, errors, requests with deadlines and guard, watches, and status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.dynamic import DynamicClient

from specdecode_operator.errors import (
    ClusterError,
    Conflict,
    EvictionBlocked,
    Gone,
    NotFound,
    Refused,
    Unavailable,
)
from specdecode_operator.kube.kinds import (
    APPLIED,
    DEPLOYMENTS,
    EVICTION,
    FIELD_MANAGER,
    PODS,
    RULES_REVIEWS,
    Kind,
)

log = logging.getLogger(__name__)

# Translation of the API server's error answers into ClusterError.

_BY_STATUS: Mapping[int, type[ClusterError]] = {
    404: NotFound,
    409: Conflict,
    410: Gone,
    **dict.fromkeys((400, 403, 405, 413, 415, 422), Refused),
}
"""All other codes are Unavailable. This includes 500 and 503 of an admission webhook that cannot be called."""

BUDGET_CAUSE = "DisruptionBudget"


def translate(error: ApiException, request: str) -> ClusterError:
    """Return the ClusterError for an answer of the API server, with the server's own message.

    Args:
        error: Answer with a status other than 2xx.
        request: Method and path, which start the message.
    """
    status = _status_object(error)
    sentence = str(status.get("message") or f"{error.status} {error.reason}")
    budgets = [cause for cause in _causes(status) if cause.get("reason") == BUDGET_CAUSE]
    if error.status == 429 and budgets:
        sentence = " ".join([sentence, *(str(cause.get("message", "")) for cause in budgets)]).strip()
        return EvictionBlocked(f"{request}: {sentence}", sentence)
    return _BY_STATUS.get(error.status, Unavailable)(f"{request}: {sentence}", sentence)


def watch_error(status: Mapping[str, Any], request: str) -> ClusterError:
    """Return the ClusterError for an ERROR event of a watch, whose object is a Status."""
    error = Gone if status.get("code") == 410 else Unavailable
    return error(f"{request}: {status.get('message', status)}")


def _status_object(error: ApiException) -> Mapping[str, Any]:
    """Return the Status in the body, or an empty mapping: proxies and rate limits answer with plain text."""
    try:
        status = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _causes(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [cause for cause in (status.get("details") or {}).get("causes") or [] if isinstance(cause, dict)]


# Connection pool to the API server: credentials, proxy, and TCP keepalive.

KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 3
KEEPALIVE_PROBES = 3
"""An idle connection whose peer is gone is closed after 10 + 3 * 3 = 19 seconds."""
UNACKNOWLEDGED_SECONDS = 20
"""A connection on which sent data is not acknowledged for this long is closed."""
READ_BUFFER_BYTES = 2**21
"""Events of a watch can exceed aiohttp's default buffer of 64 KiB."""


async def open_connection(kubeconfig: str | None = None) -> ApiClient:
    """Connect with the pod's service account, or else with a kubeconfig.

    Args:
        kubeconfig: Path of the file. None means the user's own, as kubectl chooses it.
    """
    configuration = Configuration()
    try:
        config.load_incluster_config(configuration)  # without a proxy: it is the same network
    except config.ConfigException:
        await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        configuration.proxy = configuration.proxy or environment_proxy(configuration.host)
    api = ApiClient(configuration)
    # No limit on connections: each watch occupies one, and there is a watch per kind and namespace.
    connector = aiohttp.TCPConnector(ssl=api.rest_client.ssl_context, limit=0, socket_factory=keepalive_socket)
    # With trust_env the session would look for a proxy and a netrc file in a thread, at every request, which takes half
    # of a request's time.
    api.rest_client.pool_manager = aiohttp.ClientSession(
        connector=connector, trust_env=False, read_bufsize=READ_BUFFER_BYTES
    )
    return api


def keepalive_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a TCP socket that notices a dead peer within about 20 seconds.

    Args:
        address: Address information as getaddrinfo returns it.
    """
    family, type_, protocol, *_ = address
    made = socket.socket(family=family, type=type_, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE_SECONDS,
        "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_SECONDS,
        "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": UNACKNOWLEDGED_SECONDS * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def environment_proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, or None."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


async def read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of any length; aiohttp's own readline fails on objects beyond its buffer."""
    rest: list[bytes] = []
    async for chunk in response.content.iter_any():
        first, *others = chunk.split(b"\n")
        rest.append(first)
        for piece in others:
            line = b"".join(rest)
            rest = [piece]
            if line.strip():
                yield line


# Fields that the API server's CRD declares: a CRD that is older than the operator lacks fields of its status.
#
# A server-side apply with one undeclared field is refused as a whole, whatever the field validation of the request, so
# such fields are left out.

REMEMBER_SECONDS = 600.0
"""Time after which undeclared fields are sent again, in case the CRD was upgraded."""

_UNDECLARED = re.compile(r"(?:^|\s)\.status\.(\S+): field not declared in schema")
_ELEMENT = re.compile(r"\[[^\]]*\]")

Path = tuple[str, ...]


class DeclaredFields:
    """Status fields that the API server refused, which are left out of later writes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._undeclared: dict[Path, float] = {}
        """Time until which a field is left out."""

    def declared(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the status without the fields that are known to be undeclared."""
        now = self._clock()
        self._undeclared = {path: until for path, until in self._undeclared.items() if now < until}
        remaining: Any = dict(status)
        for path in self._undeclared:
            remaining = _without(remaining, path)
        return dict(remaining)

    def note_refusal(self, message: str) -> bool:
        """Note the fields that the message of the API server names as undeclared. Return whether one is new."""
        paths = {tuple(_ELEMENT.sub("", text).split(".")) for text in _UNDECLARED.findall(message)}
        new = paths - self._undeclared.keys()
        if new:
            names = ", ".join(sorted("status." + ".".join(path) for path in new))
            log.warning("the CRD is older than this operator and lacks %s: upgrade the CRD; it is left out", names)
        self._undeclared.update(dict.fromkeys(new, self._clock() + REMEMBER_SECONDS))
        return bool(new)


def _without(value: Any, path: Path) -> Any:
    """Return the value without the field at ``path``. In lists, the field is left out of every element."""
    if isinstance(value, (list, tuple)):
        return [_without(item, path) for item in value]
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    if len(path) == 1:
        return {name: item for name, item in value.items() if name != path[0]}
    return {**value, path[0]: _without(value[path[0]], path[1:])}


# Client of the Kubernetes API: one method per verb, each with a deadline, and errors as ClusterError.
#
# Requests go by path. The kinds are fixed, so nothing is discovered, and the API server may be away at start.

Guard = Callable[[], float | None]
"""Check before a write. It raises NotLeader, or returns the seconds (above 0) within which the write must end."""

METADATA_PAGE = 500
OBJECT_PAGE = 100
"""Items in one page of a list. A page of whole pods is about one megabyte, which takes some 10 ms to parse."""
WATCH_GRACE_SECONDS = 3
"""Time that a watch may last beyond the end that the API server was asked for."""
QUIET_SECONDS = 90.0
"""Time without a line after which a watch with bookmarks is ended. The API server sends one about once a minute."""
DOUBT_PAUSE_SECONDS = 20.0
"""Least time between two closings of doubtful watches, so that a slow API server is not asked more often."""

_METADATA_LIST = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
_METADATA = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}


def allow_all() -> None:
    """Allow every write: the guard of a client that needs no leadership."""


class KubeClient:
    """Client of one API server."""

    def __init__(self, api: ApiClient, *, timeout_seconds: float = 10, guard: Guard = allow_all) -> None:
        self.guard = guard
        self.timeout_seconds = timeout_seconds
        self._api = api
        self._watches: dict[aiohttp.ClientResponse, float] = {}
        """Open watches, with the time of their last line."""
        self._doubted_at = float("-inf")
        self.status_fields = DeclaredFields()
        self._client = DynamicClient(api)

    @classmethod
    async def connect(
        cls, kubeconfig: str | None = None, *, timeout_seconds: float = 10, guard: Guard = allow_all
    ) -> KubeClient:
        """Connect with the pod's service account, or else with a kubeconfig (default: the user's own)."""
        return cls(await open_connection(kubeconfig), timeout_seconds=timeout_seconds, guard=guard)

    async def close(self) -> None:
        await self._api.close()

    async def get(self, kind: Kind, namespace: str, name: str, *, metadata_only: bool = False) -> dict[str, Any] | None:
        """Return the object, or its metadata alone (below the key ``metadata``); None if there is none."""
        try:
            return await self._request(
                "get", kind.path(namespace, name), header_params=_METADATA if metadata_only else None
            )
        except NotFound:
            return None

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = "", limit: int | None = None
    ) -> dict[str, Any]:
        """Return the List, with its resource version. Namespace None lists all namespaces."""
        return await self._request(
            "get",
            kind.path(namespace),
            label_selector=labels or None,
            field_selector=fields or None,
            limit=limit,
        )

    async def own_rules(self, namespace: str) -> dict[str, Any]:
        """Return the rules that hold for this client in a namespace: the status of a SelfSubjectRulesReview."""
        review = {"apiVersion": RULES_REVIEWS.api_version, "kind": RULES_REVIEWS.kind, "spec": {"namespace": namespace}}
        answer = await self._request("post", RULES_REVIEWS.path(None), guarded=False, body=review)
        return dict(answer["status"])

    async def pages(
        self, kind: Kind, namespace: str | None, *, labels: str, metadata_only: bool = True
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield Lists page by page, so that ten thousand pods are never in memory at once.

        Each page has the resource version to watch from. Raises Gone if the pages took too long.
        """
        token = None
        while token != "":
            page = await self._request(
                "get",
                kind.path(namespace),
                header_params=_METADATA_LIST if metadata_only else None,
                label_selector=labels or None,
                limit=METADATA_PAGE if metadata_only else OBJECT_PAGE,
                _continue=token,
            )
            yield page
            token = page["metadata"].get("continue", "")

    async def create(self, kind: Kind, manifest: Mapping[str, Any], *, guarded: bool = True) -> dict[str, Any]:
        """Create an object and return it. Raises Conflict if the name is taken."""
        path = kind.path(manifest["metadata"]["namespace"])
        return await self._request("post", path, guarded=guarded, body=dict(manifest), field_manager=FIELD_MANAGER)

    async def update(
        self, kind: Kind, manifest: Mapping[str, Any], *, subresource: str | None = None, guarded: bool = True
    ) -> dict[str, Any]:
        """Replace an object and return it. Raises Conflict if its resource version is not the manifest's any more."""
        path = kind.path(manifest["metadata"]["namespace"], manifest["metadata"]["name"], subresource)
        return await self._request("put", path, guarded=guarded, body=dict(manifest), field_manager=FIELD_MANAGER)

    async def apply(
        self, manifest: Mapping[str, Any], *, force: bool, uid: str | None = None, manager: str = FIELD_MANAGER
    ) -> dict[str, Any]:
        """Apply a manifest on the server and return the object.

        Args:
            manifest: Fields that the operator wants to own. Owned fields that it lacks are removed from the object.
            force: Take fields over that other clients own.
            uid: Uid of the object that is meant.
            manager: Name under which the fields are owned.

        Raises:
            Conflict: The object has another uid or is gone, or another client owns a field and force is False.
        """
        metadata = {**manifest["metadata"], **({"uid": uid} if uid else {})}
        path = APPLIED[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        try:
            return await self._apply(path, {**manifest, "metadata": metadata}, force=force, manager=manager)
        except Refused as error:
            # The API server calls another uid a change of an immutable field.
            if uid and "metadata.uid: " in error.sentence:
                raise Conflict(f"patch {path}: the object was replaced meanwhile") from error
            raise

    async def apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
        """Write the whole status; fields of an earlier status that it lacks are removed. Return the resource.

        Fields that the CRD does not declare are left out.
        """
        head = {"apiVersion": DEPLOYMENTS.api_version, "kind": DEPLOYMENTS.kind}
        body = {**head, "metadata": {"name": name, "namespace": namespace}}
        path = DEPLOYMENTS.path(namespace, name, "status")
        while True:
            try:
                return await self._apply(path, {**body, "status": self.status_fields.declared(status)}, force=True)
            except ClusterError as error:
                if not self.status_fields.note_refusal(error.sentence):
                    raise

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Delete an object, and later what it owns. An object that is gone is no error.

        Raises:
            Conflict: The object has another uid than ``uid``.
        """
        # A Job's pods would stay by default.
        body = {"propagationPolicy": "Background", **({"preconditions": {"uid": uid}} if uid else {})}
        with contextlib.suppress(NotFound):
            await self._request("delete", kind.path(namespace, name), body=body)

    async def evict(self, namespace: str, pod: str, uid: str) -> None:
        """Ask for the eviction of a pod. A pod that is gone is no error.

        Raises:
            EvictionBlocked: A disruption budget does not allow it now.
            Conflict: The pod has another uid. The API server says so only after 10 s, so this may be Unavailable.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        with contextlib.suppress(NotFound):
            await self._request("post", PODS.path(namespace, pod, EVICTION), body=body)

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        labels: str,
        version: str,
        metadata_only: bool = True,
        seconds: int = 300,
        bookmarks: bool = False,
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield (type, object) of each event until the API server ends the stream, or sends no bookmark any more.

        Args:
            kind: Kind to watch.
            namespace: Namespace, or None for all of them.
            labels: Label selector, empty for all objects.
            version: Resource version after which events are wanted.
            metadata_only: Ask for metadata instead of whole objects.
            seconds: Length of the stream, as the server is asked for it. A stream that lasts much longer is dead.
            bookmarks: Ask for events of type BOOKMARK, which carry a newer resource version only.

        Raises:
            Gone: The resource version is too old.
            Unavailable: The connection failed, or is dead.
        """
        path = kind.path(namespace)
        request = f"watch {path}"
        limits = aiohttp.ClientTimeout(
            total=seconds + WATCH_GRACE_SECONDS, sock_read=QUIET_SECONDS if bookmarks else None
        )
        try:
            async with asyncio.timeout(self.timeout_seconds):
                response = await self._raw(
                    "get",
                    path,
                    timeout=limits,
                    header_params=_METADATA if metadata_only else None,
                    query={"allowWatchBookmarks": "true"} if bookmarks else None,
                    label_selector=labels or None,
                    resource_version=version,
                    watch="true",
                    timeout_seconds=seconds,
                )
        except TimeoutError as error:
            raise Unavailable(f"{request}: no answer within {self.timeout_seconds:g} s") from error
        self._watches[response] = time.monotonic()
        try:
            async for line in read_lines(response):
                self._watches[response] = time.monotonic()
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise watch_error(event["object"], request)
                yield event["type"], event["object"]
        except aiohttp.SocketTimeoutError:
            return  # Quiet, or dead: the next watch shows which.
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"{request}: {error!r}") from error
        finally:
            del self._watches[response]
            response.close()

    def doubt_watches(self, seconds: float) -> None:
        """Close the watches on which nothing arrived for some seconds, because another request got no answer so long.

        Something between client and API server may have lost all open connections and still acknowledge what is sent.
        """
        now = time.monotonic()
        if now - self._doubted_at < DOUBT_PAUSE_SECONDS:
            return
        self._doubted_at = now
        for response, heard_at in list(self._watches.items()):
            if heard_at <= now - seconds:
                response.close()

    async def _apply(
        self, path: str, body: Mapping[str, Any], *, force: bool, manager: str = FIELD_MANAGER
    ) -> dict[str, Any]:
        return await self._request(
            "patch",
            path,
            body=dict(body),
            content_type="application/apply-patch+yaml",
            field_manager=manager,
            force_conflicts=force,
        )

    async def _request(self, method: str, path: str, *, guarded: bool = True, **params: Any) -> dict[str, Any]:
        """Send a request and read the whole answer, all within one deadline. Writes pass the guard first."""
        limit = self.guard() if guarded and method != "get" else None
        seconds = self.timeout_seconds if limit is None else min(self.timeout_seconds, limit)
        started = time.monotonic()
        try:
            response = await self._raw(method, path, timeout=aiohttp.ClientTimeout(total=seconds), **params)
            return dict(await response.json())
        except TimeoutError as error:
            self.doubt_watches(time.monotonic() - started)
            raise Unavailable(f"{method} {path}: {error!r}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"{method} {path}: {error!r}") from error

    async def _raw(
        self,
        method: str,
        path: str,
        *,
        timeout: aiohttp.ClientTimeout,
        header_params: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        **params: Any,
    ) -> Any:
        try:
            # The client's default lists are shared between calls and would grow.
            return await self._client.request(
                method,
                path,
                serialize=False,
                query_params=list((query or {}).items()),
                header_params=dict(header_params or {}),
                _request_timeout=timeout,
                **params,
            )
        except ApiException as error:
            raise translate(error, f"{method} {path}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise Unavailable(f"{method} {path}: {error!r}") from error
