"""Requests to the API server: lists and watches of EndpointSlices, and one ConfigMap. Every request has a deadline."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, ApiException, Configuration

from specdecode_router.errors import CannotStart, RouterError

REQUEST_SECONDS = 10.0
"""Deadline of a request. One that takes longer is repeated, on another connection."""
WATCH_GRACE_SECONDS = 3.0
"""Time that a watch may last beyond the end that the API server was asked for. After that its connection is dead."""
_SERVICE_LABEL = "kubernetes.io/service-name"
_HTTP_GONE = 410


class ApiServerError(RouterError):
    """Request to the API server that failed: refused, unanswered, or answered with something unreadable."""


class VersionExpired(ApiServerError):
    """Resource version that is too old to watch from; only a new list helps."""


class ApiServer:
    """Client of the API server with the rights of a router."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    @classmethod
    async def connect(cls, kubeconfig: str | None = None) -> ApiServer:
        """Prepare a client with the pod's service account, or else with a kubeconfig. No request is sent.

        Args:
            kubeconfig: Path of the file. None means the user's own, as kubectl chooses it.

        Raises:
            CannotStart: There is neither a service account nor a kubeconfig.
        """
        configuration = Configuration()
        try:
            config.load_incluster_config(configuration)
        except config.ConfigException:
            try:
                await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
            except (config.ConfigException, OSError) as error:
                raise CannotStart(f"the API server is not known: {error}; list workers with --worker") from error
        return cls(ApiClient(configuration))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def list_slices(self, namespace: str, service: str) -> tuple[list[dict[str, Any]], str]:
        """Return the EndpointSlices of a Service, and the resource version of the list.

        Raises:
            ApiServerError: The list could not be read.
        """
        listed = await self._read("GET", _slices(namespace), query={"labelSelector": f"{_SERVICE_LABEL}={service}"})
        try:
            return listed.get("items") or [], listed["metadata"]["resourceVersion"]
        except (KeyError, TypeError) as error:
            raise ApiServerError(f"a list without {error}") from error

    async def watch_slices(
        self, namespace: str, service: str, version: str, seconds: int
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield type and object of each event after a resource version, until the API server ends the watch.

        Args:
            namespace: Namespace of the Service.
            service: Name of the Service.
            version: Resource version after which events are wanted.
            seconds: Length of the watch, as the API server is asked for it.

        Raises:
            VersionExpired: The resource version is too old.
            ApiServerError: The watch failed, or its connection is dead.
        """
        query = {
            "labelSelector": f"{_SERVICE_LABEL}={service}",
            "resourceVersion": version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        response = await self._open("GET", _slices(namespace), seconds + WATCH_GRACE_SECONDS, query=query)
        try:
            while line := await response.content.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _status_error(event["object"])
                yield event["type"], event["object"]
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise ApiServerError(f"the watch ended: {error!r}") from error
        finally:
            response.close()

    async def config_map_data(self, namespace: str, name: str) -> dict[str, str]:
        """Return the data of a ConfigMap.

        Raises:
            ApiServerError: The ConfigMap could not be read.
        """
        read = await self._read("GET", _config_map(namespace, name))
        return dict(read.get("data") or {})

    async def patch_config_map(self, namespace: str, name: str, data: Mapping[str, str | None]) -> None:
        """Set entries of a ConfigMap; None removes an entry.

        Raises:
            ApiServerError: The ConfigMap could not be written.
        """
        await self._read(
            "PATCH",
            _config_map(namespace, name),
            headers={"Content-Type": "application/merge-patch+json"},
            body={"data": dict(data)},
        )

    async def _read(self, method: str, path: str, **parts: Any) -> dict[str, Any]:
        """Send a request and return the whole answer."""
        response = await self._open(method, path, REQUEST_SECONDS, **parts)
        try:
            return dict(await response.json(content_type=None))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            raise ApiServerError(f"{method} {path}: {error!r}") from error
        finally:
            response.release()

    async def _open(
        self,
        method: str,
        path: str,
        seconds: float,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> Any:
        """Send a request and return the response, before its body is read. The deadline holds for the body too."""
        timeout = aiohttp.ClientTimeout(total=seconds, connect=REQUEST_SECONDS)
        try:
            request = await self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", **(headers or {})},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = (await self._client.call_api(*request, _request_timeout=timeout)).response
            if response.status < 400:
                return response
            answer = await response.read()
            response.release()
        except (TimeoutError, aiohttp.ClientError, OSError, ApiException) as error:
            raise ApiServerError(f"{method} {path}: {error!r}") from error
        try:
            parsed = json.loads(answer)
        except ValueError:
            parsed = None
        raise _status_error(parsed, response.status)


def _slices(namespace: str) -> str:
    return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def _config_map(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps/{name}"


def _status_error(status: Any, code: int = 0) -> ApiServerError:
    """Return the error of a Status object of Kubernetes."""
    parsed = status if isinstance(status, dict) else {}
    code = parsed.get("code", code)
    error = VersionExpired if code == _HTTP_GONE else ApiServerError
    return error(f"{code} {parsed.get('message') or 'without a message'}")
