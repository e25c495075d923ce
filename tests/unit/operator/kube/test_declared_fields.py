"""Status writes to a CRD that is older than the operator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdecode_operator.errors import Unavailable
from specdecode_operator.kube.client import REMEMBER_SECONDS, DeclaredFields, KubeClient

STATUS = {
    "replicas": 1,
    "later": 2,
    "model": {"uri": "x", "newer": 1},
    "tasks": [{"name": "a", "odd": 1}, {"name": "b", "odd": 2}],
    "conditions": [{"type": "Ready", "odd": 1}],
}
FIRST = """failed to create typed patch object (ns/a; specdecode.io/v1alpha1, Kind=SpecDecodeDeployment): errors:
  .status.tasks[0].odd: field not declared in schema
  .status.conditions[type="Ready"].odd: field not declared in schema"""
SECOND = """failed to create typed patch object (ns/a; specdecode.io/v1alpha1, Kind=SpecDecodeDeployment): errors:
  .status.model.newer: field not declared in schema
  .status.later: field not declared in schema"""
ONE = "failed to create typed patch object (ns/a; x/v1, Kind=S): .status.later: field not declared in schema"
DECLARED = {
    "replicas": 1,
    "model": {"uri": "x"},
    "tasks": [{"name": "a"}, {"name": "b"}],
    "conditions": [{"type": "Ready"}],
}


def test_fields_that_the_api_server_names_are_left_out_for_a_while() -> None:
    clock = SimpleNamespace(now=0.0)
    fields = DeclaredFields(lambda: clock.now)
    assert fields.declared(STATUS) == STATUS
    assert fields.note_refusal(FIRST)
    assert fields.note_refusal(SECOND)
    assert fields.declared(STATUS) == DECLARED
    assert not fields.note_refusal(FIRST), "the same refusal again is not repaired"
    clock.now = REMEMBER_SECONDS
    assert fields.declared(STATUS) == STATUS, "the CRD may have been upgraded"


def test_a_single_field_is_named_in_the_same_line() -> None:
    fields = DeclaredFields()
    assert fields.note_refusal(ONE)
    assert fields.declared({"later": 1, "replicas": 1}) == {"replicas": 1}


class OldServer(KubeClient):
    """API server whose CRD lacks fields."""

    def __init__(self, *refusals: str) -> None:
        self.status_fields = DeclaredFields()
        self.refusals = list(refusals)
        self.written: list[Any] = []

    async def _apply(self, path: str, body: Any, *, force: bool) -> dict[str, Any]:
        self.written.append(body["status"])
        if self.refusals:
            raise Unavailable(f"patch {path}", self.refusals.pop(0))
        return dict(body)


async def test_a_status_is_written_without_the_fields_that_an_older_crd_lacks() -> None:
    server = OldServer(FIRST, SECOND)
    assert (await server.apply_status("ns", "a", STATUS))["status"] == DECLARED
    assert len(server.written) == 3
    await server.apply_status("ns", "a", STATUS)
    assert server.written[3:] == [DECLARED], "later writes do not try the fields again"


@pytest.mark.parametrize("refusals", [("etcd is down",), (ONE, ONE)])
async def test_other_refusals_are_raised(refusals: tuple[str, ...]) -> None:
    with pytest.raises(Unavailable):
        await OldServer(*refusals).apply_status("ns", "a", STATUS)
