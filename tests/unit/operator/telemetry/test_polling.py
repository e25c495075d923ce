"""Polling of workers: validation of reports, the client over real sockets, rounds of reports, and pushes of plans."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from specdecode_operator.errors import BadReport, Unauthorized, WorkerError, WorkerTimeout, WorkerUnreachable
from specdecode_operator.telemetry.polling import (
    MAX_BACKOFF_SECONDS,
    NOT_ASKED,
    CallLimits,
    Poller,
    Reading,
    WorkerAccess,
    WorkerCalls,
    WorkerClient,
    WorkerPoll,
    read_report,
    version_problem,
)
from specdecode_operator.types import Key, Worker
from specdecode_worker.contract import (
    CONTRACT_VERSION,
    MAX_REPORT_BYTES,
    SUPPORTED_CONTRACT_VERSIONS,
    Header,
    Plan,
    Report,
)
from support.certificates import certified_server
from support.operators.socket_workers import (
    Behaviour,
    GoodWorker,
    Request,
    SocketWorkers,
    answer,
    dripping,
    garbage,
    good_report,
    hanging,
    socket_workers,
)

KEY, OTHER = ("ns", "demo"), ("ns", "other")
ACCESS = WorkerAccess(tokens=("secret",))
PERIOD = 5.0
POD = Worker(name="pod-1", uid="u1", address="10.0.0.1", ready=True)

# --- one worker -------------------------------------------------------------------------------------------------------


def report(**fields: Any) -> Report:
    return Report.model_validate(good_report(**fields))


def timed_out(poll: WorkerPoll, started: float) -> WorkerPoll:
    return poll.failed(WorkerTimeout("late"), started=started, period=PERIOD)


def test_calls_that_hang_are_made_less_often() -> None:
    poll, now, waits = WorkerPoll(worker=POD), 1000.0, []
    for _ in range(7):
        poll = timed_out(poll, now)
        waits.append(max(0.0, poll.not_before - now))
    assert waits == [0, 7.5, 17.5, MAX_BACKOFF_SECONDS - 2.5, 27.5, 27.5, 27.5]


@pytest.mark.parametrize("error", [WorkerUnreachable("refused"), Unauthorized("401")])
def test_calls_that_fail_at_once_are_repeated_each_round(error: Exception) -> None:
    poll = WorkerPoll(worker=POD)
    for _ in range(5):
        poll = poll.failed(error, started=1000, period=PERIOD)
    assert poll.not_before == 0
    assert poll.is_unauthorized is isinstance(error, Unauthorized)


@pytest.mark.parametrize(
    ("before", "now", "at_once"),
    [
        ({"ready": False}, {"ready": True}, True),
        ({}, {"address": "10.0.0.2"}, True),
        ({}, {}, False),
        ({}, {"ready": False}, False),
    ],
)
def test_a_pod_that_became_ready_is_asked_at_once(before: dict[str, Any], now: dict[str, Any], at_once: bool) -> None:
    poll = WorkerPoll(worker=replace(POD, **before))
    for _ in range(4):
        poll = timed_out(poll, 1000)
    assert (poll.follow(replace(POD, **now)).not_before == 0) is at_once


def test_an_answer_ends_the_back_off() -> None:
    poll = WorkerPoll(worker=POD)
    for _ in range(4):
        poll = timed_out(poll, 1000)
    poll = poll.answered(Reading(report()), started=1030)
    assert (poll.timeouts, poll.not_before, poll.has_report) == (0, 0, True)


def test_a_counter_that_fell_is_not_believed_until_it_has_risen_again() -> None:
    first = report()
    poll = WorkerPoll(worker=POD).answered(Reading(first, '"a"'), started=1)
    fallen = first.model_copy(update={"drafts": first.drafts - 1, "clock_seconds": first.clock_seconds + 5})
    poll = poll.answered(Reading(fallen, '"b"'), started=6)
    assert not poll.has_report
    assert poll.problem == f"drafts: fell from {first.drafts} to {first.drafts - 1} within one boot"
    assert poll.baseline.tag == '"a"'
    restarted = fallen.model_copy(update={"boot_id": "boot-2"})
    assert poll.answered(Reading(restarted), started=11).has_report
    risen = first.model_copy(update={"drafts": first.drafts + 1, "clock_seconds": first.clock_seconds + 10})
    assert poll.answered(Reading(risen), started=11).has_report


# --- rounds -----------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Pollers of deployments over workers on sockets."""

    sockets: SocketWorkers
    calls: WorkerCalls
    pods: dict[Key, list[Worker]] = field(default_factory=dict)
    pollers: dict[Key, Poller] = field(default_factory=dict)

    async def add(self, *behaviours: Behaviour, key: Key = KEY) -> list[Worker]:
        pods = self.pods.setdefault(key, [])
        self.pollers.setdefault(key, Poller(key, self.calls))
        for behaviour in behaviours:
            name = f"{key[1]}-{len(pods)}"
            pods.append(Worker(name=name, uid=name, address=await self.sockets.add(behaviour), ready=True))
        return pods

    async def read(self, count: int = 1, key: Key = KEY) -> float:
        """Make so many rounds. Return the seconds of the last one."""
        for _ in range(count):
            began = time.monotonic()
            await self.pollers[key].read(self.pods[key], ACCESS)
        return time.monotonic() - began

    def reported(self, key: Key = KEY) -> list[Worker]:
        return [self.pollers[key].reported(pod) for pod in self.pods[key]]

    def problems(self) -> list[str | None]:
        return [pod.report_problem for pod in self.reported()]


@contextlib.asynccontextmanager
async def bench_of(
    *, deadline: float = 10, period: float = 0.4, limits: CallLimits | None = None
) -> AsyncIterator[Bench]:
    async with socket_workers() as sockets:
        client = WorkerClient(timeout_seconds=deadline)
        yield Bench(sockets, WorkerCalls(client, period=period, limits=limits))
        await client.close()


def counted(name: str, reason: str) -> float:
    return REGISTRY.get_sample_value(f"specdecode_operator_{name}_total", {"reason": reason}) or 0.0


async def test_an_unchanged_report_is_not_fetched_again() -> None:
    async with bench_of() as bench:
        await bench.add(GoodWorker(tag='"t"'))
        await bench.read(2)
        (worker,) = bench.reported()
        assert (worker.report.clock_seconds, worker.baseline.tag) == (77.5, '"t"')
        assert bench.pollers[KEY].round == 2


async def test_every_kind_of_failure_is_named_and_counted() -> None:
    before = {reason: counted("reports_failed", reason) for reason in ("timeout", "unauthorized", "bad_report")}
    async with bench_of(deadline=0.8) as bench:
        stranger = GoodWorker(tokens={"another"})
        await bench.add(GoodWorker(), hanging, dripping, garbage, stranger, GoodWorker(fields={"drafts": 1}))
        assert bench.problems() == [None] * 6, "before the first round"
        await bench.read()
        good, silent, drip, noise, refused, invalid = bench.problems()
        assert good is None
        assert str(silent).endswith("no complete answer within 0.8 s")
        assert str(drip).endswith("no complete answer within 0.8 s")
        assert "Bad status line" in str(noise) or "Expected HTTP" in str(noise)
        assert "answered 401 to each of 1 admin tokens" in str(refused)
        assert "delete it" in str(refused), "the condition says what to do"
        assert str(invalid).startswith("boot_id")
        assert all(counted("reports_failed", reason) > count for reason, count in before.items())
        assert bench.pollers[KEY].is_unauthorized


async def test_pods_that_leave_or_have_no_address_are_not_asked() -> None:
    async with bench_of() as bench:
        leaving, starting, gone = GoodWorker(), GoodWorker(), GoodWorker()
        pods = await bench.add(leaving, starting, gone)
        bench.pods[KEY] = [replace(pods[0], leaving=True), replace(pods[1], address=None), pods[2]]
        await bench.read()
        assert [worker.report is not None for worker in bench.reported()] == [False, False, True]
        assert bench.problems() == [None] * 3
        bench.pods[KEY] = bench.pods[KEY][:2]
        await bench.read()
        assert leaving.asked + starting.asked == []
        assert bench.pollers[KEY].reported(pods[2]).report is None


async def test_workers_that_hang_are_asked_less_often_until_they_are_ready_again() -> None:
    async with bench_of(deadline=0.05, period=0.1) as bench:
        asked = 0

        async def counting(*args: Any) -> None:
            nonlocal asked
            asked += 1
            await hanging(*args)

        (pod,) = await bench.add(counting)
        ends = time.monotonic() + 1.3
        while time.monotonic() < ends:
            await bench.read()
            await asyncio.sleep(0.05)
        assert 3 <= asked <= 6, "1, 2, 4 and 8 periods apart"
        bench.pods[KEY] = [replace(pod, ready=False)]
        await bench.read()
        before = asked
        bench.pods[KEY] = [pod]
        await bench.read()
        assert asked > before


async def test_workers_that_were_not_asked_in_time_go_first_in_the_next_round() -> None:
    """Six workers that need 0.3 s each, two calls at a time and 0.5 s per round: all of them get their turn."""
    async with bench_of(deadline=0.4, limits=CallLimits(total=2, per_deployment=2)) as bench:
        believed: set[str] = set()

        async def slow(*args: Any) -> None:
            await asyncio.sleep(0.3)
            await GoodWorker()(*args)

        await bench.add(*[slow] * 6)
        await bench.read()
        assert bench.problems().count(NOT_ASKED) >= 2
        for _ in range(12):
            believed |= {worker.uid for worker in bench.reported() if worker.report is not None}
            if len(believed) == 6:
                return
            await bench.read()
        pytest.fail(f"only {len(believed)} of 6 workers were asked in 13 rounds")


async def test_workers_that_hang_take_no_places_from_others() -> None:
    """The hanging workers of one deployment want more places than there are."""
    async with bench_of(deadline=0.6, limits=CallLimits(total=4, per_deployment=4)) as bench:
        await bench.add(*[hanging] * 4)
        await bench.add(GoodWorker(), GoodWorker(), key=OTHER)
        await bench.read()
        hang = asyncio.create_task(bench.read())
        await asyncio.sleep(0.05)
        assert await bench.read(key=OTHER) < 0.3
        await hang


async def test_a_round_ends_with_its_budget() -> None:
    async with bench_of(deadline=0.4, limits=CallLimits(total=2, per_deployment=2)) as bench:
        await bench.add(*[hanging] * 12)
        assert await bench.read() < 1, "six deadlines, one after the other, are 2.4 s"


# --- plans ------------------------------------------------------------------------------------------------------------


async def test_plans_are_pushed_by_address_and_a_failure_is_counted() -> None:
    async with bench_of() as bench:
        refusing, taking = GoodWorker(push_status=409), GoodWorker()
        pods = await bench.add(refusing, taking)
        before = counted("push_failed", "refused")
        await bench.calls.push(KEY, {str(pod.address): Plan(uid="u", version=3) for pod in pods}, ACCESS)
        assert [plan.version for plan in taking.plans] == [3]
        assert counted("push_failed", "refused") == before + 1


async def test_a_push_ends_when_another_process_may_lead() -> None:
    async with bench_of(deadline=20) as bench:
        (pod,) = await bench.add(hanging)
        before = counted("push_failed", "not_asked")
        async with asyncio.timeout(5):
            await bench.calls.push(KEY, {str(pod.address): Plan(uid="u", version=3)}, ACCESS, limit=0.2)
        assert counted("push_failed", "not_asked") == before + 1


# --- validation: an invalid report is refused by the name of its field, unknown fields are ignored --------------------


def read(**fields: Any) -> None:
    read_report(json.dumps({**good_report(), **fields}).encode())


def test_lists_of_names_are_no_numbers() -> None:
    read(plan={"tasks": [{"name": "acme", "clients": ["acme", "globex"], "merge": [{"draft": "d"}]}]})


def test_unknown_fields_of_a_newer_worker_are_ignored() -> None:
    draft = {**good_report()["draft"], "mood": 1}
    read(contract_version=CONTRACT_VERSION + 1, unknown="value", draft=draft)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"drafts": -1}, "drafts"),
        ({"drafts": "many"}, "drafts"),
        ({"drafts": 10**400}, "drafts"),
        ({"clock_seconds": None}, "clock_seconds"),
        ({"boot_id": 7}, "boot_id"),
        ({"running_request_seconds": 1e999}, "running_request_seconds"),
        ({"running_request_seconds": float("nan")}, "running_request_seconds"),
        ({"contract_version": CONTRACT_VERSION + 2}, "contract_version"),
        ({"acceptance": [{"draft": "d"}]}, r"acceptance\.0\.task"),
        ({"latency": [{"name": "ttft", "edges": [1], "counts": [1], "sum": 1}]}, r"latency\.0"),
        ({"steps": "none"}, "steps"),
        ({"steps": [{**good_report()["steps"][0], "x": [1.0]}]}, r"steps\.0"),
    ],
)
def test_an_invalid_field_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(BadReport, match=name):
        read(**change)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'"report"', b"x" * (MAX_REPORT_BYTES + 1)])
def test_a_body_that_is_not_a_report_is_refused(body: bytes) -> None:
    with pytest.raises(BadReport):
        read_report(body)


# --- contract versions ------------------------------------------------------------------------------------------------


def test_the_last_three_versions_and_one_newer_are_supported() -> None:
    assert CONTRACT_VERSION + 1 in SUPPORTED_CONTRACT_VERSIONS
    assert CONTRACT_VERSION + 2 not in SUPPORTED_CONTRACT_VERSIONS
    assert SUPPORTED_CONTRACT_VERSIONS.start == max(1, CONTRACT_VERSION - 2)


def test_the_problem_of_another_version_says_what_to_do() -> None:
    supported = range(2, 6)
    assert [version_problem(version, supported) for version in supported] == [None] * 4
    assert version_problem(6, supported) == "contract 6 is newer than this operator's 2..5: upgrade the operator"
    older = version_problem(1, supported)
    assert older.startswith("contract 1 is older than this operator's 2..5: roll out newer workers")


@pytest.mark.parametrize(("version", "advice"), [(0, "roll out newer workers"), (99, "upgrade the operator")])
def test_the_version_explains_a_report_that_does_not_parse(version: int, advice: str) -> None:
    with pytest.raises(BadReport, match=f"contract {version} .*{advice}"):
        read(contract_version=version, drafts="renamed")


def test_an_unknown_value_of_a_newer_worker_names_field_and_version() -> None:
    with pytest.raises(BadReport, match=rf"draft\.method: .*contract {CONTRACT_VERSION + 1}, .*upgrade the operator"):
        read(contract_version=CONTRACT_VERSION + 1, draft={"method": "mtp"})


# --- client: one deadline for each call -------------------------------------------------------------------------------


@pytest.fixture
async def workers() -> AsyncIterator[SocketWorkers]:
    async with socket_workers() as started:
        yield started


@pytest.fixture
async def client() -> AsyncIterator[WorkerClient]:
    client = WorkerClient(timeout_seconds=60)
    yield client
    await client.close()


def answering(status: int, body: bytes = b"", **headers: str) -> Behaviour:
    async def behaviour(request: Request, writer: asyncio.StreamWriter) -> None:
        answer(writer, status, body, **headers)

    return behaviour


async def test_the_deadline_bounds_all_tokens_together(workers: SocketWorkers, client: WorkerClient) -> None:
    async def slow_refusal(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        answer(writer, 401)

    address = await workers.add(slow_refusal)
    client.timeout_seconds = 0.5
    with pytest.raises(WorkerTimeout):
        await client.report(address, ("a", "b", "c"))


async def test_calls_do_not_wait_for_calls_that_hang(workers: SocketWorkers, client: WorkerClient) -> None:
    """The connector of the HTTP library would otherwise open a hundred connections at most."""
    silent, working = await workers.add(hanging), await workers.add(GoodWorker())
    calls = [asyncio.create_task(client.report(silent, "secret")) for _ in range(120)]
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        await client.report(working, "secret")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_closed_port_and_garbage_are_unreachable(workers: SocketWorkers, client: WorkerClient) -> None:
    for address in ("127.0.0.1", await workers.add(garbage)):
        with pytest.raises(WorkerUnreachable):
            await client.report(address, "secret")


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_a_report_without_end_is_cut_off(workers: SocketWorkers, client: WorkerClient) -> None:
    address = await workers.add(answering(200, b"x" * (MAX_REPORT_BYTES * 20)))
    with pytest.raises(BadReport, match=str(MAX_REPORT_BYTES)):
        await client.report(address, "secret")


async def test_a_redirect_is_not_followed(workers: SocketWorkers, client: WorkerClient) -> None:
    target = GoodWorker()
    location = f"http://{await workers.add(target)}:8001/v1/report"
    address = await workers.add(answering(307, Location=location))
    with pytest.raises(WorkerError, match="answered 307"):
        await client.report(address, "secret")
    assert target.asked == []


@pytest.mark.parametrize("clock", ["", "soon", "nan", "-1", "inf"])
async def test_an_unchanged_report_needs_a_clock(workers: SocketWorkers, client: WorkerClient, clock: str) -> None:
    address = await workers.add(answering(304, **{Header.clock_seconds: clock}))
    with pytest.raises(BadReport, match=Header.clock_seconds):
        await client.report(address, "secret", '"t"')


async def test_a_304_without_a_known_tag_is_not_a_report(workers: SocketWorkers, client: WorkerClient) -> None:
    address = await workers.add(answering(304))
    with pytest.raises(BadReport):
        await client.report(address, "secret")


async def test_a_refused_plan_has_the_reason_of_the_worker(workers: SocketWorkers, client: WorkerClient) -> None:
    address = await workers.add(answering(409, json.dumps({"error": {"message": "another uid"}}).encode()))
    with pytest.raises(WorkerError, match="another uid"):
        await client.push(address, "secret", Plan())


# --- tokens -----------------------------------------------------------------------------------------------------------


async def test_the_next_token_is_tried_after_a_401_and_remembered(workers: SocketWorkers, client: WorkerClient) -> None:
    worker = GoodWorker(tokens={"previous"})
    address = await workers.add(worker)
    for _ in range(2):
        await client.report(address, ("current", "previous"))
    assert worker.asked == ["current", "previous", "previous"]
    client.forget(address)
    await client.report(address, ("current", "previous"))
    assert worker.asked[3:] == ["current", "previous"]


async def test_the_current_token_is_first_again_when_the_worker_has_reloaded(
    workers: SocketWorkers, client: WorkerClient
) -> None:
    worker = GoodWorker(tokens={"previous"})
    address = await workers.add(worker)
    await client.report(address, ("current", "previous"))
    worker.tokens = {"current"}
    for _ in range(2):
        await client.report(address, ("current", "previous"))
    assert worker.asked[2:] == ["previous", "current", "current"]


@pytest.mark.parametrize("status", [403, 500, 503])
async def test_other_statuses_do_not_try_the_next_token(
    workers: SocketWorkers, client: WorkerClient, status: int
) -> None:
    asked: list[str] = []

    async def behaviour(request: Request, writer: asyncio.StreamWriter) -> None:
        asked.append(request.token)
        answer(writer, status)

    address = await workers.add(behaviour)
    with pytest.raises(WorkerError, match=str(status)):
        await client.report(address, ("current", "previous"))
    assert asked == ["current"]


@pytest.mark.parametrize("tokens", [(), ("a",), ("a", "b")])
async def test_no_accepted_token_is_unauthorized(
    workers: SocketWorkers, client: WorkerClient, tokens: tuple[str, ...]
) -> None:
    address = await workers.add(GoodWorker())
    with pytest.raises(Unauthorized, match=f"{len(tokens)} admin tokens"):
        await client.report(address, tokens)


# --- https ------------------------------------------------------------------------------------------------------------


async def test_https_verifies_the_signature_but_not_the_address(workers: SocketWorkers, tmp_path: Path) -> None:
    ca_file, context = certified_server(tmp_path, "ours")
    _, foreign = certified_server(tmp_path, "foreign")
    plan_taker = GoodWorker(fields=good_report())
    address, impostor = await workers.add(plan_taker, tls=context), await workers.add(GoodWorker(), tls=foreign)
    client = WorkerClient(ca_file=ca_file, timeout_seconds=60)
    try:
        assert isinstance(await client.report(address, "secret", tls=True), Reading)
        await client.push(address, "secret", Plan(version=3), tls=True)
        assert [plan.version for plan in plan_taker.plans] == [3]
        with pytest.raises(WorkerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await client.report(impostor, "secret", tls=True)
    finally:
        await client.close()


async def test_a_changed_ca_file_is_read_again(workers: SocketWorkers, tmp_path: Path) -> None:
    before, _ = certified_server(tmp_path, "before")
    after, context = certified_server(tmp_path, "after")
    ca_file = tmp_path / "ca.crt"
    ca_file.write_bytes(before.read_bytes())
    address = await workers.add(GoodWorker(), tls=context)
    client = WorkerClient(ca_file=ca_file, timeout_seconds=60)
    try:
        with pytest.raises(WorkerUnreachable):
            await client.report(address, "secret", tls=True)
        ca_file.write_bytes(after.read_bytes())
        assert isinstance(await client.report(address, "secret", tls=True), Reading)
        ca_file.unlink()
        with pytest.raises(WorkerUnreachable, match=r"ca\.crt"):
            await client.report(address, "secret", tls=True)
    finally:
        await client.close()
