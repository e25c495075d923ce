"""Validation of reports: their size, contract version and counters."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from specdecode_operator.errors import BadReport
from specdecode_worker.contract import (
    CONTRACT_VERSION,
    FEATURES,
    MAX_REPORT_BYTES,
    SUPPORTED_CONTRACT_VERSIONS,
    Received,
    Report,
)

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
    _check_numbers(report)
    _check_moments(report)
    return report


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a report with the path of its field."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from numbers(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from numbers(item, f"{path}.{index}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


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


def _check_numbers(report: Report) -> None:
    """Raise BadReport for a negative or infinite number."""
    if _has_only_counts(report):
        return
    for path, number in numbers(report):
        if not _is_count(number):
            raise BadReport(f"{path}: {number} is not a count")


def _has_only_counts(report: Report) -> bool:
    """Return whether every number is certainly a count.

    This checks all numbers together, since a report has thousands and ten thousand workers are polled. Paths are
    computed only in case of doubt. The sum finds NaN, which compares with nothing.
    """
    collected: list[float] = []
    _collect(report, collected)
    return min(collected) >= 0 and _is_count(max(collected)) and math.isfinite(sum(collected))


def _collect(value: BaseModel, into: list[float]) -> None:
    for item in vars(value).values():
        if isinstance(item, BaseModel):
            _collect(item, into)
        elif isinstance(item, tuple) and item and isinstance(item[0], BaseModel):
            for part in item:
                _collect(part, into)
        elif isinstance(item, tuple):
            into += item
        elif isinstance(item, (int, float)):
            into.append(item)


def _is_count(number: float) -> bool:
    """Return whether a number is not negative, and small enough for a float: integers of JSON have no bound."""
    return 0 <= number <= sys.float_info.max


def _check_moments(report: Report) -> None:
    """Raise BadReport for a step cell with another number of features."""
    for index, cell in enumerate(report.steps):
        lengths = (len(cell.x), len(cell.xt), len(cell.xx))
        if lengths != (len(FEATURES), len(FEATURES), _TRIANGLE):
            raise BadReport(f"steps.{index}: moments of lengths {lengths} do not fit {len(FEATURES)} features")
