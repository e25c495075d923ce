"""`kubectl specdecode`: its text for what the API server has."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specdecode_operator.plugin.explain import explain, past
from specdecode_operator.plugin.overview import age, mode_of
from specdecode_operator.state.learned import AcceptanceCell
from specdecode_operator.telemetry.counters import CellKey, Moments
from support.operators.fleet import Loop, Truth, loop_over
from support.operators.statuses import explained, polled, resource_of


@pytest.fixture(scope="module")
def deepened() -> Loop:
    """A deployment whose depth rose from 3 to 5, and whose gain was measured."""
    loop = loop_over(Truth(chances=[0.98] * 5, sequences=3), explore=0.1, scaling={"owner": "Operator"})
    polled(loop, 40)
    return loop


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        ({"speculation": {"pin": "chain:2"}}, "Pin chain:2"),
        ({"speculation": {"pin": "chain:2"}, "paused": True}, "Paused"),
        ({"speculation": {"mode": "Advisory"}}, "Advisory"),
        ({"speculation": {"method": "none", "draft": None}}, "none"),
    ],
)
def test_what_decides(spec: dict[str, Any], mode: str) -> None:
    loop = loop_over(**spec)
    polled(loop, 2)
    assert mode_of(resource_of(loop.deployment)) == mode


def test_history_shows_what_was_promised_and_what_came_true(deepened: Loop) -> None:
    lines = past(resource_of(deepened.deployment), deepened.now)
    rows = [re.split(r" {3,}", line.rstrip()) for line in lines if not line.startswith("      ")]
    measured = [row for row in rows[1:] if row[5] != "-"]
    assert measured, lines
    assert measured[0][1:4] == ["Plan", "chain:3", "chain:5"]
    expected, realised = (int(cell.removesuffix(" %")) for cell in measured[0][4:6])
    assert realised == pytest.approx(expected, abs=8)
    assert any("acceptance by depth 0.9" in line for line in lines)


def test_explain_has_the_numbers_behind(deepened: Loop) -> None:
    text = "\n".join(explain(resource_of(deepened.deployment), deepened.memory.learned, deepened.now))
    assert "Depth at the current load: 5" in text
    assert "Mode Auto: the depth between 0 and 5 with the least time per token" in text
    later, last = deepened.deployment.status.speculation.history
    assert (later.load[:14], last.load[:16]) == ("concurrency 2,", "concurrency 3-4,")
    assert f" at {last.load}: {last.before} -> {last.after}. " in " ".join(text.split()), "of the present load"
    assert "Workers needed for this demand: 1." in text
    assert "between 1 and 4 workers" in text
    steps = {line.split("  ")[1]: line.split() for line in text.splitlines() if line.startswith(("  plain", "  depth"))}
    assert set(steps) == {"plain", *(f"depth {depth}" for depth in range(1, 6))}
    assert float(steps["plain"][2]) == pytest.approx(21.2, rel=0.05), "20 ms and 0.4 ms a token, of three sequences"
    assert steps["plain"][3] == "1", "a token a step"


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({"measuredAt": None, "speedup": None}, "Not measured yet: acceptance rate and speedup are reported once"),
        ({"speedup": 1.1, "acceptanceRate": None}, "ago: speedup 1.1. The acceptance rate is reported once there were"),
        ({"speedup": 1.1, "acceptanceRate": 0.35, "acceptedLength": 2}, "speedup 1.1, acceptance rate 0.35, 2 tokens"),
    ],
)
def test_explain_says_what_the_figures_wait_for(
    deepened: Loop, figures: dict[str, float | None], sentence: str
) -> None:
    resource = resource_of(deepened.deployment)
    resource["status"]["speculation"] |= figures
    text = explained(resource, None, deepened.now)
    assert sentence in text
    assert "rate -" not in text


def test_a_new_deployment_is_measuring_until_its_first_decision() -> None:
    """Explain, status and history agree with the depth until the first decision, and after it."""
    loop = loop_over(Truth(chances=[0.98] * 5, sequences=3), explore=0.1)
    said = []
    for _ in range(24):
        polled(loop, 1)
        resource, learned = resource_of(loop.deployment), loop.memory.learned
        text = "\n".join(explain(resource, learned, loop.now))
        is_measuring = "Measuring: " in text
        assert ("no decisions for demo yet, measuring: " in past(resource, loop.now)[0]) == is_measuring
        said.append(is_measuring)
        if is_measuring:
            assert "Last change" not in text
            assert loop.depths[-1] == 3
            seen = next((cell.total for cell in learned.acceptance if cell.depth == 1), 0)
            assert f"The estimates rest on {seen:.0f} drafts so far" in text
        else:
            assert "drafts so far" not in text
    assert said[0]
    assert said == sorted(said, reverse=True), "once reliable, estimates stay so"
    assert not said[-1]
    assert loop.depths[-1] == 5


def test_the_steps_of_explain_compare_with_plain_steps_at_the_same_load(deepened: Loop) -> None:
    lines = explain(resource_of(deepened.deployment), deepened.memory.learned, deepened.now)
    (deep,) = [line for line in lines if line.startswith("  depth 5")]
    plain, drafted = 21.2, (20 + 2 * 5 + 0.4 * 3 * 6) / 5.7
    assert int(deep.split("+")[1].split()[0]) == pytest.approx(100 * (plain / drafted - 1), abs=15)
    an_hour_later = explain(resource_of(deepened.deployment), deepened.memory.learned, deepened.now + 3600)
    (later,) = [line for line in an_hour_later if line.startswith("  depth 5")]
    assert (deep.split()[-1], later.split()[-1]) == ("0s", "60m")


def test_steps_that_workers_timed_before_they_served_count_for_no_tokens(deepened: Loop) -> None:
    learned = deepened.memory.learned
    kind = max((cell for cell in learned.costs if cell.draft_passes), key=lambda cell: cell.values[0])

    def shown(answering: float, timed: float) -> list[str]:
        """Columns of the kind of step, with this many steps that answered and that were only timed."""
        known = Moments(kind.values)
        steps = known.times((answering + timed) / known.count).with_emitted(known.emitted * answering / known.count)
        cell = kind.model_copy(update={"values": steps.values, "made_up": timed})
        others = (one for one in learned.costs if CellKey.of(one) != CellKey.of(kind))
        state = learned.model_copy(update={"costs": (*others, cell)})
        lines = explain(resource_of(deepened.deployment), state, deepened.now)
        (line,) = [line for line in lines if line.startswith(f"  depth {kind.draft_passes}  ")]
        return [column for column in line.split("  ") if column]

    tokens, gain = 3, 5
    assert float(shown(20, 20)[tokens]) == float(shown(20, 0)[tokens])
    assert "%" in shown(20, 0)[gain]
    assert shown(4, 0)[gain].strip() == "-", "too few steps for a gain"
    assert shown(0, 7)[tokens].strip() == "-", "no answer, no tokens"


def test_explain_says_how_many_of_the_drafted_tokens_were_verified(deepened: Loop) -> None:
    learned = deepened.memory.learned
    kind = next(cell for cell in learned.costs if cell.draft_passes == 3 and cell.values[0] >= 8)
    deeper = learned.model_copy(update={"costs": (kind.model_copy(update={"draft_passes": 5}),)})
    lines = explain(resource_of(deepened.deployment), deeper, deepened.now)
    assert any(line.startswith("  depth 5, 3 verified ") for line in lines), lines


def test_explain_names_the_steps_of_a_parallel_draft_by_their_nodes() -> None:
    loop = loop_over(Truth(method="peagle"), explore=0.1, speculation={"method": "peagle"})
    polled(loop, 20)
    lines = explain(resource_of(loop.deployment), loop.memory.learned, loop.now)
    assert any(line.startswith("  one pass, 3 nodes ") for line in lines), lines
    assert not any(line.startswith("  depth") for line in lines)


def test_acceptance_is_that_of_the_main_path(deepened: Loop) -> None:
    """Acceptance below a sibling is another measure: the draft was wrong there before."""
    learned = deepened.memory.learned
    under = AcceptanceCell(task="other", depth=2, hits=0, total=1e6, at=0, parent="sibling")
    mixed = learned.model_copy(update={"acceptance": (*learned.acceptance, under)})
    resource = resource_of(deepened.deployment)
    assert explain(resource, mixed, deepened.now) == explain(resource, learned, deepened.now)


def test_explain_shows_the_plan_by_concurrency(deepened: Loop) -> None:
    lines = explain(resource_of(deepened.deployment), deepened.memory.learned, deepened.now)
    (head,) = [line for line in lines if line.startswith("  PLAN: TASK")]
    assert head.split() == ["PLAN:", "TASK", "1", "2", "3-4", "5-8", ">8"]
    (row,) = [line for line in lines if line.startswith("  other") and "chain" in line]
    assert row.split()[3] == "chain:5", "at three sequences"


def test_explain_says_that_the_depth_is_of_an_earlier_plan(deepened: Loop) -> None:
    resource, learned = resource_of(deepened.deployment), deepened.memory.learned
    sentence = f"Plan version {learned.plan.version} has chain:5 at this load. No worker has reported"
    assert sentence not in explained(resource, learned, deepened.now)
    resource["status"]["speculation"]["depth"] = 4
    assert sentence in explained(resource, learned, deepened.now)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("SuspendedByGuards", "the workers suspend chain:5 of the plan at the current load"),
        ("NoDraft", "no worker can use the draft; DraftCompatible says why"),
    ],
)
def test_explain_says_why_workers_do_not_run_the_plan(deepened: Loop, reason: str, message: str) -> None:
    resource, sentence = resource_of(deepened.deployment), f"{message[0].upper()}{message[1:]}."
    resource["status"]["speculation"]["depth"] = 0
    assert sentence not in explained(resource, deepened.memory.learned, deepened.now)
    for condition in resource["status"]["conditions"]:
        if condition["type"] == "SpeculationEffective":
            condition.update(status="False", reason=reason, message=message)
    assert sentence in explained(resource, deepened.memory.learned, deepened.now)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"speculation": {"mode": "Static"}}, "Mode Static: the depth is speculation.depth.initial, 3."),
        ({"speculation": {"mode": "Off"}}, "Mode Off"),
        ({"speculation": {"method": "none", "draft": None}}, "No draft is loaded"),
        ({"scaling": {"owner": "External"}, "replicas": 1}, "changes of spec.replicas (1), by an HPA, KEDA or a user."),
        ({}, "follows changes of spec.replicas (1); spec.scaling is absent"),
    ],
)
def test_explain_says_who_decides(spec: dict[str, object], words: str) -> None:
    loop = loop_over(**spec)
    polled(loop, 2)
    assert words in "\n".join(explain(resource_of(loop.deployment), None, loop.now))


def test_explain_of_a_deployment_without_a_status_does_not_say_that_speculation_is_off(deepened: Loop) -> None:
    resource = resource_of(deepened.deployment)
    del resource["status"]
    text = explained(resource, None, deepened.now)
    assert "has made no plan for this deployment yet" in text
    assert "method is none" not in text


def test_a_status_of_a_newer_operator_is_read_all_the_same(deepened: Loop) -> None:
    resource = resource_of(deepened.deployment)
    resource["status"]["novelty"] = {"a": 1}
    resource["status"]["speculation"]["novelty"] = 1
    resource["status"]["speculation"]["history"][0]["novelty"] = 1
    resource["status"]["conditions"][0]["novelty"] = 1
    resource["spec"]["speculation"]["novelty"] = 1
    assert explain(resource, None, deepened.now) == explain(resource_of(deepened.deployment), None, deepened.now)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5s"), (119, "119s"), (120, "2m"), (7199, "120m"), (7200, "2h"), (200000, "2d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert age("1970-01-01T00:00:00Z", seconds) == text
    assert age("yesterday", 0) == age(None, 0) == "-"


@pytest.mark.parametrize(
    ("kind", "status", "is_shown"),
    [("Stalled", "True", True), ("Reconciling", "True", False), ("Ready", "False", True), ("Ready", "True", False)],
)
def test_explain_shows_conditions_that_are_a_problem(deepened: Loop, kind: str, status: str, is_shown: bool) -> None:
    resource = resource_of(deepened.deployment)
    times = {"lastTransitionTime": "1970-01-01T00:00:00Z"}
    resource["status"]["conditions"] = [{"type": kind, "status": status, "reason": "R", "message": "m", **times}]
    assert ("PROBLEMS" in explain(resource, None, deepened.now)) == is_shown
