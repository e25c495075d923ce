"""An API server of fixed objects for informers, and the operator's caches over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from specdecode_operator.controller.children import Caches
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import Kind
from support.background import background


class ListingApi:
    """API server with objects that never change. Lists fail by ``errors``, and wait until ``answers`` is set."""

    def __init__(self, *objects: tuple[Kind, dict[str, Any]]) -> None:
        self.objects = objects
        self.errors: dict[Kind, Exception] = {}
        self.answers = asyncio.Event()
        self.answers.set()

    async def pages(self, kind: Kind, namespace: str | None, *, labels: str, metadata_only: bool) -> AsyncIterator[Any]:
        await self.answers.wait()
        if kind in self.errors:
            raise self.errors[kind]
        items = [one for of, one in self.objects if of is kind and selects(labels, one["metadata"]["labels"])]
        yield {"metadata": {"resourceVersion": "1"}, "items": items}

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    def caches(self) -> Caches:
        return Caches(cast("KubeClient", self), ["ns"], lambda key: None, lambda key: None)


def selects(labels: str, pod_labels: dict[str, str]) -> bool:
    """Return whether a label selector of the operator selects these labels."""
    for term in labels.split(",") if " in " not in labels else [labels.split(",", 1)[0]]:
        key, _, value = term.partition("=")
        if key not in pod_labels or (value and pod_labels[key] != value):
            return False
    return " in " not in labels or pod_labels.get("specdecode.io/role") in ("worker", "router")


@asynccontextmanager
async def synced_caches(api: ListingApi) -> AsyncIterator[Caches]:
    """Yield caches that run and have the objects of an API server."""
    caches = api.caches()
    async with background(caches.run()):
        await asyncio.wait_for(caches.wait_synced(), 10)
        yield caches
