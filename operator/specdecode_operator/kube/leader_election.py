"""Leader election by a Lease, with the semantics of client-go.

The Lease names its holder, which renews it. Another replica takes it over when it has not seen it change for the
lease's duration by its own clock; times in the Lease are for people and are never compared. The holder stops writing
earlier than that, after ``renew_deadline``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from specdecode_operator.errors import ClusterError, Conflict, NotLeader
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import LEASES

log = logging.getLogger(__name__)


def boot_clock() -> float:
    """Return seconds of a clock that also runs while the process is stopped or the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeaderElector:
    """Candidate for one Lease."""

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        lease_seconds: float = 15,
        renew_deadline: float = 10,
        retry_seconds: float = 2,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """Prepare a candidate; nothing is requested before ``run``.

        Args:
            client: Client of the API server.
            namespace: Namespace of the Lease.
            name: Name of the Lease.
            identity: Name of this process. No other process may have it, not even an earlier one of the same pod.
            lease_seconds: Time without a renewal after which another replica takes over.
            renew_deadline: Time after the last renewal for which this process may write.
            retry_seconds: Pause between two attempts to acquire or to renew.
            clock: Clock, in seconds; it must not stop while the process is stopped.
        """
        if not 0 < retry_seconds < renew_deadline < lease_seconds:
            raise ValueError("required: 0 < retry_seconds < renew_deadline < lease_seconds")
        self.identity = identity
        self.lost = asyncio.Event()
        """Set when leadership ends, and cleared when it begins."""
        self._client = client
        self._namespace = namespace
        self._name = name
        self._lease_seconds = lease_seconds
        self._renew_deadline = renew_deadline
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._leading = asyncio.Event()
        self._renewed_at = float("-inf")
        """Start of the last request that renewed the Lease."""
        self._lease: dict[str, Any] = {}
        """The Lease as it was seen last; empty before."""
        self._changed_at = float("-inf")
        """Time at which the Lease was first seen as it is."""

    async def run(self) -> None:
        """Acquire the Lease, renew it, and acquire it again when it is lost, for ever."""
        while True:
            await self.attempt()
            await asyncio.sleep(self._pause())

    async def wait_until_leader(self) -> None:
        """Wait until this process holds the Lease."""
        await self._leading.wait()

    @property
    def is_leader(self) -> bool:
        """True if this process holds the Lease by its own clock."""
        return self._leading.is_set() and self._clock() - self._renewed_at < self._renew_deadline

    def check(self) -> float:
        """Return the seconds until another process may take over. Raises NotLeader if leadership is not certain."""
        if not self.is_leader:
            raise NotLeader(f"{self.identity} does not hold the Lease {self._namespace}/{self._name} for certain")
        return self._renewed_at + self._lease_seconds - self._clock()

    async def release(self) -> None:
        """Give the Lease up, so that another replica need not wait for its end.

        Call it after ``run`` was cancelled and all writes have ended. Failures are logged: the Lease ends by itself.
        """
        self._step_down("it is released")
        try:
            async with asyncio.timeout(self._renew_deadline / 2):
                while not await self._try_release():
                    continue
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease %s/%s was not released: %s", self._namespace, self._name, error)

    async def attempt(self) -> None:
        """Try once to acquire or renew the Lease."""
        started = self._clock()
        limit = self._renew_deadline / 2
        if self._leading.is_set():
            limit = min(limit, max(0.0, self._renewed_at + self._renew_deadline - started))
        try:
            async with asyncio.timeout(limit):
                held = await self._acquire_or_renew()
        except (ClusterError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._client.doubt_watches(self._clock() - started)
            level = logging.INFO if isinstance(error, Conflict) else logging.WARNING
            log.log(level, "Lease %s/%s: %s", self._namespace, self._name, error or "no answer in time")
            if self._leading.is_set() and not self.is_leader:
                self._step_down(f"it was not renewed within {self._renew_deadline:g} s")
            return
        if not held:
            self._step_down("another process holds it")
            return
        self._renewed_at = started
        if not self._leading.is_set():
            log.info("%s is the leader", self.identity)
            self.lost.clear()
            self._leading.set()

    def _pause(self) -> float:
        """Return seconds until the next attempt: not beyond the moment when the Lease or the own deadline ends."""
        end = self._renewed_at + self._renew_deadline if self._leading.is_set() else self._expires_at()
        remaining = end - self._clock()
        return min(self._retry_seconds, remaining) if remaining > 0 else self._retry_seconds

    def _step_down(self, reason: str) -> None:
        self._renewed_at = float("-inf")
        if self._leading.is_set():
            log.warning("%s is no longer the leader: %s", self.identity, reason)
            self._leading.clear()
            self.lost.set()

    async def _acquire_or_renew(self) -> bool:
        """Return whether this process holds the Lease now. Raises ClusterError if that cannot be said."""
        if self.is_leader and self._lease:
            try:
                await self._write(self._renewed_spec(), self._lease)
                return True
            except Conflict:
                pass  # Another process wrote it, or an earlier request of this one arrived late.
        lease = await self._client.get(LEASES, self._namespace, self._name)
        if lease is None:
            await self._create()
            return True
        self._observe(lease)
        if self._holder() not in ("", self.identity) and self._clock() < self._expires_at():
            return False
        await self._write(self._renewed_spec(), lease)
        return True

    def _observe(self, lease: dict[str, Any]) -> None:
        """Take a Lease that was read, and note the time if it is not the one that was known."""
        if lease.get("spec") != self._lease.get("spec"):
            self._changed_at = self._clock()
        self._lease = lease

    def _holder(self) -> str:
        return str((self._lease.get("spec") or {}).get("holderIdentity") or "")

    def _expires_at(self) -> float:
        """Return the time at which the Lease ends without a renewal."""
        spec = self._lease.get("spec") or {}
        return self._changed_at + float(spec.get("leaseDurationSeconds") or self._lease_seconds)

    def _renewed_spec(self) -> dict[str, Any]:
        spec = dict(self._lease.get("spec") or {})
        now = micro_time()
        if self._holder() != self.identity:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = now
        return {
            **spec,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self._lease_seconds)),
            "renewTime": now,
        }

    async def _create(self) -> None:
        self._lease = {}
        lease = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {**self._renewed_spec(), "leaseTransitions": 0},
        }
        self._observe(await self._client.create(LEASES, lease, guarded=False))

    async def _write(self, spec: Mapping[str, Any], lease: Mapping[str, Any]) -> None:
        """Replace the Lease if it still is as it was read; raises Conflict if not."""
        self._observe(await self._client.update(LEASES, {**lease, "spec": dict(spec)}, guarded=False))

    async def _try_release(self) -> bool:
        """Remove this process as holder. Return False if the Lease changed meanwhile."""
        lease = await self._client.get(LEASES, self._namespace, self._name)
        spec = dict((lease or {}).get("spec") or {})
        if lease is None or spec.pop("holderIdentity", None) != self.identity:
            return True
        try:
            await self._write({**spec, "leaseDurationSeconds": 1, "renewTime": micro_time()}, lease)
        except Conflict:
            return False
        return True


def micro_time() -> str:
    """Return the present time as Kubernetes writes a MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
