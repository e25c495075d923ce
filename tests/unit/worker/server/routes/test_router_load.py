"""Tests of the load that a worker reports to routers, and of the routers that it counts."""

from __future__ import annotations

from specdecode_worker.contract import DraftState, PlanState, Report, StepCell, TaskMatch
from specdecode_worker.contract.internal_stream import (
    PlanTask,
    StepKindTime,
    WorkerLoad,
    decode_document,
    encode_document,
)
from specdecode_worker.server.routes.internal import ROUTER_SECONDS, SETTLE_SECONDS, RouterTable, load_of


def test_routers_count_while_they_ask() -> None:
    routers = RouterTable()
    for name, now in (("b", 100.0), ("a", 101.0), ("", 101.0), ("b", 109.0)):
        routers.record(name, now)
    assert routers.names == ("a", "b")
    routers.record("b", 101.5 + ROUTER_SECONDS)
    assert routers.names == ("b",)


def test_a_new_worker_is_not_settled_until_every_router_has_had_the_time_to_ask() -> None:
    routers = RouterTable()
    routers.record("a", 100)
    assert not routers.settled
    routers.record("b", 100 + SETTLE_SECONDS)
    assert routers.settled


def test_a_load_has_what_routers_need_of_a_report() -> None:
    cell = StepCell(tokens_bucket=8, draft_passes=2, prefill=False, context_bucket=0, count=200, x=(), xx=(), xt=(),
                    t=1.5, tt=0, device_seconds=0, wall_seconds=0, clipped=0, emitted=0)  # fmt: skip
    report = Report(
        boot_id="b",
        worker="w",
        clock_seconds=1,
        max_num_seqs=7,
        compatibility_key="k",
        named_drafts=(DraftState(name="coder"), DraftState(name="broken", problem="no file")),
        plan=PlanState(
            tasks=(
                TaskMatch(name="code", match="```", draft="coder"),
                TaskMatch(name="sql", draft="broken"),
                TaskMatch(name="chat"),
            )
        ),
        steps=(cell,),
    )
    load = decode_document(WorkerLoad, encode_document(load_of(report, {"t": 3}, RouterTable())))
    assert (load.clients, load.max_num_seqs, load.compatibility_key, load.routers) == ({"t": 3}, 7, "k", ())
    assert load.tasks == (PlanTask("code", "```", "coder"), PlanTask("sql"), PlanTask("chat"))
    assert load.steps == (StepKindTime(8, 2, False, 0, 200, 1.5),)
