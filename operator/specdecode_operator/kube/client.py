"""Client of the Kubernetes API: one method per verb, each with a deadline, and errors as ClusterError.

Requests go by path. The kinds are fixed, so nothing is discovered, and the API server may be away at start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException
from kubernetes.aio.dynamic import DynamicClient

from specdecode_operator.errors import ClusterError, Conflict, NotFound, Refused, Unavailable
from specdecode_operator.kube.api_errors import translate, watch_error
from specdecode_operator.kube.connection import open_connection, read_lines
from specdecode_operator.kube.declared_fields import DeclaredFields
from specdecode_operator.kube.kinds import (
    APPLIED,
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    EVICTION,
    FIELD_MANAGER,
    PERMISSIONS,
    PODS,
    RULES_REVIEWS,
    SECRETS,
    WORKLOADS,
    Kind,
)

__all__ = [
    "APPLIED",
    "CONFIG_MAPS",
    "DEPLOYMENTS",
    "EVENTS",
    "PERMISSIONS",
    "PODS",
    "SECRETS",
    "WORKLOADS",
    "Kind",
    "KubeClient",
]

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

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """Return the object, or None if there is none."""
        try:
            resource = await self._request("get", kind.path(namespace, name))
        except NotFound:
            return None
        return resource

    async def get_metadata(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """Return the object's metadata alone (below the key ``metadata``), or None if there is no object."""
        try:
            return await self._request("get", kind.path(namespace, name), header_params=_METADATA)
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

    async def update(self, kind: Kind, manifest: Mapping[str, Any], *, guarded: bool = True) -> dict[str, Any]:
        """Replace an object and return it. Raises Conflict if its resource version is not the manifest's any more."""
        path = kind.path(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        return await self._request("put", path, guarded=guarded, body=dict(manifest), field_manager=FIELD_MANAGER)

    async def apply(self, manifest: Mapping[str, Any], *, force: bool, uid: str | None = None) -> dict[str, Any]:
        """Apply a manifest on the server and return the object.

        Args:
            manifest: Fields that the operator wants to own. Owned fields that it lacks are removed from the object.
            force: Take fields over that other clients own.
            uid: Uid of the object that is meant.

        Raises:
            Conflict: The object has another uid or is gone, or another client owns a field and force is False.
        """
        metadata = {**manifest["metadata"], **({"uid": uid} if uid else {})}
        path = APPLIED[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        try:
            return await self._apply(path, {**manifest, "metadata": metadata}, force=force)
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

    async def _apply(self, path: str, body: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        return await self._request(
            "patch",
            path,
            body=dict(body),
            content_type="application/apply-patch+yaml",
            field_manager=FIELD_MANAGER,
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
