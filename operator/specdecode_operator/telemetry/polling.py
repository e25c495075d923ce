"""Calls to workers' admin ports: their reports, which are read in rounds, and the plans that are pushed to them.

One call has one total deadline. Reports are checked before anybody sees them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel, ValidationError

from specdecode_operator import metrics
from specdecode_operator.errors import (
    BadReport,
    OperatorError,
    Unauthorized,
    WorkerError,
    WorkerTimeout,
    WorkerUnreachable,
)
from specdecode_operator.state.learned import LastReport
from specdecode_operator.telemetry.counters import Totals, regression
from specdecode_operator.types import Key, Worker
from specdecode_worker.contract import (
    CONTRACT_VERSION,
    FEATURES,
    MAX_REPORT_BYTES,
    SUPPORTED_CONTRACT_VERSIONS,
    Header,
    Plan,
    Port,
    Received,
    Report,
    Route,
)

TIMEOUT_SECONDS = 2.0
"""Total deadline of one call: connection, TLS, request, and all of the answer. A busy worker answers in 50 ms."""
MAX_TAG = 128
"""Characters of an ETag that are stored; the ETag of a worker has 34."""
UNAUTHORIZED = 401
WRONG_SECRET = (
    "if this lasts for minutes, the Secret <name>-tokens is of another client: delete it, and the operator creates it"
)
"""Advice in the condition: the operator may create this Secret, and may neither read nor change it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A report, and its ETag."""

    report: Report
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Answer of a worker whose report has changed in nothing but the clock since the reading with the known ETag."""

    clock_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    method: str
    address: str
    route: str
    tls: bool
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'https' if self.tls else 'http'}://{host}:{Port.admin}{self.route}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class WorkerClient:
    """Client of all workers' admin ports. It must be created on the event loop.

    It does not reuse connections: most workers are polled once in several seconds, ten thousand open sockets would
    wait for that, and a server closes them sooner.

    Args:
        proxy: HTTP proxy, for networks where pods cannot be reached directly.
        timeout_seconds: Total deadline of a call, in seconds.
        ca_file: CA certificates (PEM) that sign the certificates of workers with TLS. None means those of the system.
            The file is read again when it changes.
    """

    def __init__(
        self,
        *,
        proxy: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        ca_file: Path | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._tls = _TlsContext(ca_file)
        self._accepted: dict[str, str] = {}
        """By address: the token that the worker accepted, where it was not the first one."""
        # A proxy of the environment is not used, because it cannot reach pod addresses. The connector has no limit
        # of its own: calls that wait for a connection would miss their deadline. WorkerCalls bounds open calls.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
            proxy=proxy,
        )

    async def close(self) -> None:
        await self._http.close()

    async def report(
        self, address: str, tokens: str | Sequence[str], known_tag: str = "", *, tls: bool = False
    ) -> Reading | Unchanged:
        """Read the report of one worker.

        Args:
            address: IP address of the pod.
            tokens: Admin tokens, the current one first. The next one is tried only after a 401.
            known_tag: ETag of the last reading.
            tls: Whether the worker serves https.

        Raises:
            WorkerTimeout: No complete answer within the deadline.
            WorkerUnreachable: No connection, or a broken one.
            Unauthorized: The worker accepts none of the tokens.
            BadReport: The answer is not a usable report.
            WorkerError: Another status than 200 and the 304 for ``known_tag``.
        """
        headers = {"If-None-Match": known_tag} if known_tag else {}
        request = _Request(method="GET", address=address, route=Route.report, tls=tls, headers=headers)
        answer = await self._call(request, tokens)
        if known_tag and answer.status == 304:
            return Unchanged(_clock_of(answer))
        return Reading(read_report(answer.body), answer.headers.get("ETag", "")[:MAX_TAG])

    async def push(self, address: str, tokens: str | Sequence[str], plan: Plan, *, tls: bool = False) -> None:
        """Push a plan to one worker. Raise as ``report`` does; a refused plan is a WorkerError with the reason."""
        content = plan.model_dump_json().encode()
        request = _Request(method="PUT", address=address, route=Route.plan, tls=tls, content=content)
        await self._call(request, tokens)

    def forget(self, address: str) -> None:
        """Drop what is stored for a worker that is gone."""
        self._accepted.pop(address, None)

    async def _call(self, request: _Request, tokens: str | Sequence[str]) -> _Answer:
        """Send one request, within the deadline for all tokens together. Raise WorkerError for every failure."""
        address = request.address
        try:
            async with asyncio.timeout(self.timeout_seconds):
                answer = await self._authorized(request, (tokens,) if isinstance(tokens, str) else tuple(tokens))
        except TimeoutError as error:
            raise WorkerTimeout(f"{address}: no complete answer within {self.timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerUnreachable(f"{address}: {str(error) or repr(error)}") from error
        if answer.status >= 300 and answer.status != 304:
            described = f"{request.method} {request.route} answered {answer.status}: {answer.body[:200]!r}"
            raise WorkerError(f"{address}: {described}")
        return answer

    async def _authorized(self, request: _Request, tokens: tuple[str, ...]) -> _Answer:
        """Send the request with one token after the other until the worker accepts one."""
        accepted = self._accepted.get(request.address)
        for token in sorted(tokens, key=lambda token: token != accepted):
            answer = await self._send(request, token)
            if answer.status != UNAUTHORIZED:
                self._remember(request.address, token, first=tokens[0])
                return answer
        raise Unauthorized(f"{request.address}: answered 401 to each of {len(tokens)} admin tokens; {WRONG_SECRET}")

    async def _send(self, request: _Request, token: str) -> _Answer:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **request.headers}
        # A redirect is not followed: the token is for this worker alone.
        async with self._http.request(
            request.method,
            request.url,
            headers=headers,
            data=request.content,
            allow_redirects=False,
            ssl=self._tls.current() if request.tls else True,
        ) as response:
            return _Answer(status=response.status, headers=response.headers, body=await _read_bounded(response))

    def _remember(self, address: str, token: str, *, first: str) -> None:
        if token == first:
            self._accepted.pop(address, None)
        else:
            self._accepted[address] = token


class _TlsContext:
    """TLS settings of calls, which follow changes of the CA file."""

    def __init__(self, ca_file: Path | None) -> None:
        self._ca_file = ca_file
        self._modified = -1
        self._context: ssl.SSLContext | None = None

    def current(self) -> ssl.SSLContext:
        """Return the settings with the CA file as it is now. Raise OSError if it cannot be read."""
        modified = self._ca_file.stat().st_mtime_ns if self._ca_file else 0
        if self._context is None or modified != self._modified:
            context = ssl.create_default_context(cafile=self._ca_file)
            # Pods are called by IP address, and their certificate is shared by all pods of a deployment, whose
            # addresses are not known when it is issued. The signature of the CA is still required.
            context.check_hostname = False
            self._context, self._modified = context, modified
        return self._context


def _clock_of(answer: _Answer) -> float:
    """Return the clock of a worker whose report is unchanged. Raise BadReport if the header is invalid."""
    text = answer.headers.get(Header.clock_seconds, "")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise BadReport(f"{Header.clock_seconds}: {text[:40]!r} is not a clock")
    return seconds


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raise BadReport after MAX_REPORT_BYTES, without reading the rest."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_REPORT_BYTES:
            raise BadReport(f"the report has more than {MAX_REPORT_BYTES} bytes")
    return bytes(body)


# Contract versions of workers: which ones the operator reads, and what to do about the others. Pure.


def version_problem(version: int, supported: range = SUPPORTED_CONTRACT_VERSIONS) -> str | None:
    """Return why reports of this contract version cannot be read, and what helps. Return None if they can."""
    if version in supported:
        return None
    versions = f"this operator's {supported.start}..{supported.stop - 1}"
    if version >= supported.stop:
        return f"contract {version} is newer than {versions}: upgrade the operator"
    # A restart alone is not enough: with updatePolicy OnSpecChange the pods would start from the same image again.
    return (
        f"contract {version} is older than {versions}: roll out newer workers "
        "(set spec.workers.image, or spec.workers.updatePolicy: Automatic)"
    )


def newer_note(version: int) -> str:
    """Return a note for an invalid report of a newer worker, which may use values that this operator cannot know."""
    if version <= CONTRACT_VERSION:
        return ""
    return f" (contract {version}, this operator writes {CONTRACT_VERSION}; upgrade the operator)"


# Validation of reports: an invalid one is refused by the name of its field.
#
# A report is refused if it is too large, is not JSON, has a field of another type, a negative or infinite number, or a
# contract version that is not supported. Unknown fields come from a newer worker and are ignored. Pure.

_TRIANGLE = len(FEATURES) * (len(FEATURES) + 1) // 2
"""Numbers in the upper triangle of a step cell's moment matrix."""


class _Versioned(Received):
    """The one field that every contract version has."""

    contract_version: int = CONTRACT_VERSION


def read_report(body: bytes) -> Report:
    """Return the report after checking everything that the rest of the operator relies on.

    Raises:
        BadReport: The body is not a usable report; the message names the field, or the contract version.
    """
    if len(body) > MAX_REPORT_BYTES:
        raise BadReport(f"the report has {len(body)} bytes, at most {MAX_REPORT_BYTES} are read")
    try:
        report = Report.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(body, error) from error
    problem = version_problem(report.contract_version)
    if problem is not None:
        raise BadReport(f"contract_version: {problem}")
    if invalid := _no_count(report):
        raise BadReport(f"{invalid[0]}: {invalid[1]} is not a count")
    _check_moments(report)
    return report


def _invalid(body: bytes, error: ValidationError) -> BadReport:
    """Return the error of a body that does not parse. An unsupported version explains any other mismatch."""
    try:
        version = _Versioned.model_validate_json(body).contract_version
    except ValidationError:
        version = CONTRACT_VERSION
    problem = version_problem(version)
    if problem is not None:
        return BadReport(f"contract_version: {problem}")
    first = error.errors()[0]
    return BadReport(f"{'.'.join(map(str, first['loc'])) or 'report'}: {first['msg']}{newer_note(version)}")


def _no_count(value: object) -> tuple[str, float] | None:
    """Return the path and the value of the first number that is negative or too large for a float; None without one.

    Integers of JSON have no bound. A report has thousands of numbers and ten thousand workers are polled, so that the
    path is made on the way back from such a number alone.
    """
    parts: Iterable[tuple[object, Any]] = enumerate(value) if isinstance(value, tuple) else vars(value).items()
    for name, part in parts:
        if isinstance(part, (int, float)):
            if not 0 <= part <= sys.float_info.max:
                return str(name), part
        elif isinstance(part, (tuple, BaseModel)) and (invalid := _no_count(part)):
            return f"{name}.{invalid[0]}", invalid[1]
    return None


def _check_moments(report: Report) -> None:
    """Raise BadReport for a step cell with another number of features."""
    for index, cell in enumerate(report.steps):
        lengths = (len(cell.x), len(cell.xt), len(cell.xx))
        if lengths != (len(FEATURES), len(FEATURES), _TRIANGLE):
            raise BadReport(f"steps.{index}: moments of lengths {lengths} do not fit {len(FEATURES)} features")


# Calls to workers: their reports, which are read in rounds, and the plans that are pushed to them.

log = logging.getLogger(__name__)

START_SECONDS = 0.1
"""Time within which the first calls of a round begin, on a busy event loop. Where the budget is the deadline of a call,
they still end by that deadline, and count as timeouts."""
MAX_BACKOFF_SECONDS = 30.0
"""Longest time between two calls of a worker that does not answer; status shows a stale report after 30 s."""
NOT_ASKED = "not asked in time"
"""Problem of a worker whose turn did not come within the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoll:
    """State of polling one pod. Times are seconds of the monotonic clock."""

    worker: Worker
    """The pod, as the cache has it."""
    baseline: LastReport | None = None
    """Last report that was read and believed. The next report is compared with it."""
    totals: Totals | None = None
    """Counters of that report, so that it need not be unpacked for the comparison."""
    has_report: bool = False
    """True if the latest attempt brought a report."""
    problem: str = ""
    """Reason why the latest attempt brought none. Empty before the first one."""
    asked_at: float = 0
    """Start of the latest attempt that ended with a result."""
    timeouts: int = 0
    """Attempts in a row without a complete answer."""
    not_before: float = 0
    """The worker is not asked before this time."""
    is_unauthorized: bool = False
    """True if the latest call failed because the worker accepts none of the tokens."""

    def follow(self, worker: Worker) -> WorkerPoll:
        """Return the state for the pod as it is now. A pod that became ready or moved is asked without delay."""
        restarted = (worker.ready and not self.worker.ready) or worker.address != self.worker.address
        if restarted:
            return replace(self, worker=worker, timeouts=0, not_before=0)
        return replace(self, worker=worker)

    def answered(self, answer: Reading | Unchanged, *, started: float) -> WorkerPoll:
        """Return the state after an answer to a call that started at this time."""
        asked = replace(
            self, asked_at=started, timeouts=0, not_before=0, is_unauthorized=False, has_report=True, problem=""
        )
        if isinstance(answer, Unchanged):
            assert self.baseline is not None, "an ETag is sent only with a known report"
            return replace(asked, baseline=self.baseline.at(answer.clock_seconds))
        problem = regression(self._known_totals, answer.report)
        if problem is not None:
            return replace(asked, has_report=False, problem=problem)
        return replace(
            asked,
            baseline=LastReport.of(answer.report, answer.tag),
            totals=Totals.of(answer.report),
        )

    @property
    def _known_totals(self) -> Totals | None:
        """Totals at the last contact: an unchanged report has the totals of the one before, at a later clock."""
        if self.totals is None or self.baseline is None:
            return None
        return self.totals._replace(clock_seconds=self.baseline.clock_seconds)

    def failed(self, error: Exception, *, started: float, period: float) -> WorkerPoll:
        """Return the state after a failed call. ``period`` is the time between rounds, in seconds."""
        timeouts = self.timeouts + 1 if isinstance(error, WorkerTimeout) else 0
        return replace(
            self,
            has_report=False,
            problem=str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}",
            asked_at=started,
            timeouts=timeouts,
            is_unauthorized=isinstance(error, Unauthorized),
            not_before=started + backoff_seconds(timeouts, period) if timeouts > 1 else 0,
        )

    def not_asked(self) -> WorkerPoll:
        """Return the state after a round that ended before this worker answered or was asked."""
        return replace(self, has_report=False, problem=NOT_ASKED)


def backoff_seconds(timeouts: int, period: float) -> float:
    """Return the time until the next call after that many timeouts in a row.

    It ends half a period early, so that the call belongs to the round that is nearest.
    """
    return min(MAX_BACKOFF_SECONDS, period * 2.0 ** min(timeouts - 1, 30)) - period / 2


def failure_reason(error: Exception) -> str:
    """Return the label under which a failed call is counted."""
    if isinstance(error, WorkerTimeout):
        return "timeout"
    if isinstance(error, WorkerUnreachable):
        return "unreachable"
    if isinstance(error, Unauthorized):
        return "unauthorized"
    if isinstance(error, BadReport):
        return "bad_report"
    return "refused" if isinstance(error, WorkerError) else "internal"


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccess:
    """Access to the admin ports of one deployment's workers."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Admin tokens, the current one first."""
    tls: bool = False
    """True if the admin ports serve https."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of open calls to workers.

    Workers whose last call timed out have places of their own, so that calls to other workers never wait for them.
    """

    total: int = 64
    """Limit for all deployments together. On a busy processor more open calls only make each of them slower."""
    per_deployment: int = 16
    slow_total: int = 32
    """Limit for the workers of all deployments whose last call timed out."""
    slow_per_deployment: int = 8


class WorkerCalls:
    """Calls of all deployments to their workers, within the limits of open calls and the budget of a round.

    Args:
        client: Client of the admin ports. It has the deadline of a single call.
        period: Time between rounds, in seconds.
        limits: Limits of open calls.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        client: WorkerClient,
        *,
        period: float,
        limits: CallLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client, self.period, self.clock = client, period, clock
        self.limits = limits or CallLimits()
        self._places = {
            False: asyncio.Semaphore(self.limits.total),
            True: asyncio.Semaphore(self.limits.slow_total),
        }
        """For workers that answered last time, and for those that timed out."""
        self.budget = max(period, client.timeout_seconds + START_SECONDS)

    async def read(self, key: Key, polls: Iterable[WorkerPoll], access: WorkerAccess) -> list[WorkerPoll]:
        """Read the reports of all workers that are due. Return the new state of every worker.

        The workers that were asked least recently go first. The round ends with its budget: workers that were not
        asked, or whose call was cut short, carry NOT_ASKED and therefore go first in the next round.
        """
        ends = asyncio.get_running_loop().time() + self.budget
        turns = {
            False: asyncio.Semaphore(self.limits.per_deployment),
            True: asyncio.Semaphore(self.limits.slow_per_deployment),
        }

        async def read(poll: WorkerPoll) -> WorkerPoll:
            if self.clock() < poll.not_before:
                return poll
            is_slow = poll.timeouts > 0
            try:
                async with asyncio.timeout_at(ends), turns[is_slow], self._places[is_slow]:
                    return await self._read_one(key, poll, access)
            except TimeoutError:
                metrics.REPORTS_FAILED.labels("not_asked").inc()
                return poll.not_asked()

        return list(await asyncio.gather(*(read(poll) for poll in sorted(polls, key=lambda poll: poll.asked_at))))

    async def push(
        self, key: Key, plans: Mapping[str, Plan], access: WorkerAccess, *, limit: float | None = None
    ) -> None:
        """Push plans by address, within ``limit`` seconds: then another process may lead.

        A failed push is not repeated here: the next report shows whether it is needed.
        """
        ends = asyncio.get_running_loop().time() + min(self.budget, math.inf if limit is None else limit)
        await asyncio.gather(*(self._push_one(key, address, plan, access, ends) for address, plan in plans.items()))

    async def _read_one(self, key: Key, poll: WorkerPoll, access: WorkerAccess) -> WorkerPoll:
        assert poll.worker.address is not None, "only workers with an address are asked"
        tag = poll.baseline.tag if poll.baseline else ""
        started = self.clock()
        try:
            answer = await self.client.report(poll.worker.address, access.tokens, tag, tls=access.tls)
            after = poll.answered(answer, started=started)
        except Exception as error:
            metrics.REPORTS_FAILED.labels(failure_reason(error)).inc()
            if not isinstance(error, OperatorError):
                log.error("%s/%s: reading the report of %s failed", *key, poll.worker.name, exc_info=error)
            return poll.failed(error, started=started, period=self.period)
        if not after.has_report:
            metrics.REPORTS_FAILED.labels("bad_report").inc()
        return after

    async def _push_one(self, key: Key, address: str, plan: Plan, access: WorkerAccess, ends: float) -> None:
        try:
            async with asyncio.timeout_at(ends), self._places[False]:
                await self.client.push(address, access.tokens, plan, tls=access.tls)
        except Exception as error:
            is_late = isinstance(error, TimeoutError)
            metrics.PUSH_FAILED.labels("not_asked" if is_late else failure_reason(error)).inc()
            log.info("%s/%s: plan %d was not pushed to %s: %s", *key, plan.version, address, error or NOT_ASKED)


class Poller:
    """Last reports of one deployment's workers, which rounds replace."""

    def __init__(self, key: Key, calls: WorkerCalls) -> None:
        self.round = 0
        """Number of rounds so far; a higher number means new reports."""
        self.has_news = False
        """True if the last round brought a report that the one before had not, or none of some worker."""
        self._key, self._calls = key, calls
        self._polls: dict[str, WorkerPoll] = {}
        """By uid of the pod."""

    async def read(self, workers: Iterable[Worker], access: WorkerAccess) -> None:
        """Read the reports of all workers that have an address and stay."""
        present = [worker for worker in workers if worker.address is not None and not worker.leaving]
        uids = {worker.uid for worker in present}
        self._forget(poll for uid, poll in self._polls.items() if uid not in uids)
        known = self._polls
        due = [
            known[worker.uid].follow(worker) if worker.uid in known else WorkerPoll(worker=worker) for worker in present
        ]
        before, polls = self._tags(), await self._calls.read(self._key, due, access)
        self._polls = {poll.worker.uid: poll for poll in polls}
        self.has_news = before != (after := self._tags()) or "" in after.values()
        self.round += 1

    def reported(self, worker: Worker) -> Worker:
        """Return the worker with its last report, or with the reason why there is none."""
        poll = self._polls.get(worker.uid)
        if worker.leaving or worker.address is None or poll is None:
            return worker
        if poll.has_report and poll.baseline is not None:
            return replace(worker, report=poll.baseline.report, baseline=poll.baseline)
        return replace(worker, report_problem=poll.problem) if poll.problem else worker

    @property
    def is_unauthorized(self) -> bool:
        """True if a worker accepted none of the tokens in the last round."""
        return any(poll.is_unauthorized for poll in self._polls.values())

    def forget(self) -> None:
        """Drop everything, of a deployment that is gone."""
        self._forget(self._polls.values())
        self._polls = {}

    def _tags(self) -> dict[str, str]:
        """Return the ETag of the last report of every worker; empty if the last attempt brought none."""
        polls = self._polls.items()
        return {uid: poll.baseline.tag if poll.has_report and poll.baseline else "" for uid, poll in polls}

    def _forget(self, polls: Iterable[WorkerPoll]) -> None:
        for poll in polls:
            if poll.worker.address is not None:
                self._calls.client.forget(poll.worker.address)
