"""Validation of reports: an invalid one is refused by the name of its field; unknown fields are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdecode_operator.errors import BadReport
from specdecode_operator.telemetry.polling import read_report, version_problem
from specdecode_worker.contract import CONTRACT_VERSION, MAX_REPORT_BYTES, SUPPORTED_CONTRACT_VERSIONS
from support.operators.socket_workers import good_report


def read(**fields: Any) -> None:
    read_report(json.dumps({**good_report(), **fields}).encode())


def test_a_good_report_is_read() -> None:
    read()


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
    ],
)
def test_an_invalid_field_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(BadReport, match=name):
        read(**change)


def test_moments_of_another_length_are_refused() -> None:
    report = good_report()
    report["steps"][0]["x"].append(1.0)
    with pytest.raises(BadReport, match=r"steps\.0"):
        read_report(json.dumps(report).encode())


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
