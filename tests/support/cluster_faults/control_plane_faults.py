"""Faults of the local cluster's control plane: an API server that hangs or is dead, and a slow etcd.

The processes are those of hack/cluster, whose state folder has their pids.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from localcluster import control_plane, daemons
from localcluster.settings import Layout

API_SERVER, ETCD = "kube-apiserver", "etcd"
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
STOPPED_SECONDS, RUNNING_SECONDS = 0.4, 0.1
"""Pulses of a slow etcd: a request that arrives at a random time waits 0.16 s on average, and at most 0.4 s."""

MOST_PAUSE_SECONDS = 0.5


def pid_of(daemon: str) -> int:
    """Return the pid of a daemon of the local cluster."""
    identity = daemons.running(Layout.from_environment(), daemon)
    assert identity, f"{daemon} of the local cluster does not run"
    return identity.pid


@contextmanager
def hanging_api_server() -> Iterator[None]:
    """Stop the API server's process while the block runs. Connections to it stay open and get no answer."""
    pid = pid_of(API_SERVER)
    with _ended_controllers():
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def dead_api_server() -> Iterator[None]:
    """Kill the API server's process, and start another one after the block. Connections to it are refused.

    One that gets SIGTERM takes itself out of the Service `kubernetes`, and kube-proxy learns late that it is back.
    """
    with _ended_controllers():
        daemons.stop(Layout.from_environment(), API_SERVER, grace_s=0)
        yield


@contextmanager
def _ended_controllers() -> Iterator[None]:
    """End the controller manager and the scheduler, and start what does not run after the block.

    With leader election both exit when they cannot renew their Lease, and start again. The local cluster's have none: a
    controller manager that lives through an outage of over 50 s takes the heartbeats of nodes for late, and takes all
    pods out of Services.
    """
    layout = Layout.from_environment()
    for daemon in CONTROLLERS:
        daemons.stop(layout, daemon)
    try:
        yield
    finally:
        control_plane.ensure(layout)


@contextmanager
def slow_etcd() -> Iterator[None]:
    """Stop and continue etcd's process in short pulses while the block runs."""
    pid, ended = pid_of(ETCD), threading.Event()
    pulses = threading.Thread(target=_send_pulses, args=(pid, ended))
    pulses.start()
    try:
        yield
    finally:
        ended.set()
        pulses.join()


def _send_pulses(pid: int, ended: threading.Event) -> None:
    try:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            ended.wait(STOPPED_SECONDS)
            os.kill(pid, signal.SIGCONT)
            ended.wait(RUNNING_SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)


def time_calls(call: Callable[[], object], seconds: float) -> list[float]:
    """Return the duration in seconds of calls that are made at random times, one after the other."""
    durations, deadline = [], time.monotonic() + seconds
    while (began := time.monotonic()) < deadline:
        call()
        durations.append(time.monotonic() - began)
        time.sleep(random.uniform(0, MOST_PAUSE_SECONDS))
    return durations
