"""Stand-ins for placement and admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from specdecode_router.workers.worker import WorkerView


@dataclass(frozen=True, slots=True)
class Affinity:
    salt: str = ""
    task: str = ""
    prefix: bytes = b""


def affinity_of(route: str, body: Any, *, tenant: str, task: str | None) -> Affinity:
    return Affinity(tenant, task or "")


def choose(
    workers: Sequence[WorkerView],
    affinity: Affinity,
    *,
    compatibility_key: str = "",
    exclude: frozenset[str] = frozenset(),
) -> WorkerView | None:
    usable = [
        one
        for one in workers
        if one.endpoint.name not in exclude
        and (not compatibility_key or one.compatibility_key in ("", compatibility_key))
    ]
    return min(usable, key=lambda one: (one.suspect, one.in_flight / one.endpoint.weight), default=None)


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str = ""
    weight: float = 1.0
    priority: int = 0
    max_in_flight: int | None = None


class Place:
    def release(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Admission:
    held = waiting = running = 0

    def set_capacity(self, places: int) -> None: ...

    async def acquire(self, tenant: Tenant, priority: int, deadline_seconds: float | None) -> Place:
        return Place()
