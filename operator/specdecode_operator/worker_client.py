"""Workers' admin ports: reads reports, pushes plans. Whatever a worker answers, a reconcile goes on.

A report is refused by name: too large, no JSON, a field out of its type, a negative or infinite number, another
contract. What is merely unknown comes from a newer worker and is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from specdecode_operator.errors import BadReport, WorkerError, WorkerUnreachable
from specdecode_worker.contract import CONTRACT_VERSION, FEATURES, MAX_REPORT_BYTES, Plan, Port, Report, Route

TIMEOUT_SECONDS = 2.0
_TRIANGLE = len(FEATURES) * (len(FEATURES) + 1) // 2


class Workers:
    """A client of all workers' admin ports."""

    def __init__(self, http: httpx.AsyncClient | None = None) -> None:
        # Pods are reached directly: a proxy of the environment knows nothing of pod addresses.
        self._http = http or httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def report(self, address: str, token: str) -> Report:
        """Raises WorkerUnreachable or BadReport."""
        return read_report(await self._call("GET", address, Route.report, token))

    async def push(self, address: str, token: str, plan: Plan) -> None:
        """Raises WorkerUnreachable, or WorkerError when the worker refuses the plan."""
        await self._call("PUT", address, Route.plan, token, content=plan.model_dump_json().encode())

    async def _call(self, method: str, address: str, route: str, token: str, content: bytes | None = None) -> bytes:
        host = f"[{address}]" if ":" in address else address
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        url = f"http://{host}:{Port.admin}{route}"
        try:
            async with self._http.stream(method, url, headers=headers, content=content) as response:
                body = await _bounded(response)
        except httpx.HTTPError as error:
            raise WorkerUnreachable(f"{address}: {error!r}") from error
        if response.status_code >= 300:
            raise WorkerError(f"{address}: {method} {route} answered {response.status_code}: {body[:200]!r}")
        return body


async def _bounded(response: httpx.Response) -> bytes:
    """A body of at most MAX_REPORT_BYTES; the rest is not even read."""
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_REPORT_BYTES:
            raise BadReport(f"the report has more than {MAX_REPORT_BYTES} bytes")
    return body


def read_report(body: bytes) -> Report:
    """Checks everything that the rest of the operator relies on. Raises BadReport that names the field."""
    if len(body) > MAX_REPORT_BYTES:
        raise BadReport(f"the report has {len(body)} bytes, at most {MAX_REPORT_BYTES} are read")
    try:
        report = Report.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadReport(f"{'.'.join(map(str, first['loc'])) or 'report'}: {first['msg']}") from error
    if abs(report.contract_version - CONTRACT_VERSION) > 1:
        raise BadReport(f"contract_version: {report.contract_version}, this operator speaks {CONTRACT_VERSION}")
    for path, number in numbers(report):
        if not math.isfinite(number) or number < 0:
            raise BadReport(f"{path}: {number} is no count")
    for index, cell in enumerate(report.steps):
        lengths = (len(cell.x), len(cell.xt), len(cell.xx))
        if lengths != (len(FEATURES), len(FEATURES), _TRIANGLE):
            raise BadReport(f"steps.{index}: moments of lengths {lengths} do not fit {len(FEATURES)} features")
    return report


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a report with its path."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from numbers(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from numbers(item, f"{path}.{index}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value
