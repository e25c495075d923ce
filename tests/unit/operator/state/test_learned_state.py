"""Sections of the state ConfigMap: round trip, bound, damage, migration, sections of a newer operator."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdecode_operator.state import learned as learned_module
from specdecode_operator.state.compact import encode
from specdecode_operator.state.learned import (
    MAX_STATE_BYTES,
    LearnedState,
    parse_state,
    read_state,
    render_state,
    write_state,
)
from specdecode_operator.state.sections import MAX_PARKED_DRAFTS, SECTIONS, draft_key, section_of
from support.operators.crowd import Crowd, same
from support.operators.fleet import loop_over

LEARNED = Crowd().learned()
WRITTEN = render_state(LEARNED)


def size(data: dict[str, str]) -> int:
    return sum(len(text.encode()) for text in data.values())


# --- round trip and bound -------------------------------------------------------------------------------------------


def test_the_worst_case_fits_into_half_of_the_bound() -> None:
    learned = Crowd().learned()
    rendered = write_state(learned)
    assert not rendered.dropped
    assert size(rendered.data) < MAX_STATE_BYTES / 2
    stored = read_state(rendered.data, "u")
    assert stored.learned is not None
    assert (stored.problems, len(stored.learned.parked)) == ((), MAX_PARKED_DRAFTS)
    assert same(stored.learned, learned.model_copy(update={"costs": stored.learned.costs}))
    assert same(stored.learned.costs, sorted(learned.costs, key=lambda cell: (cell.tokens_bucket, cell.draft_passes)))


def test_every_section_stays_within_its_bound() -> None:
    for key, text in render_state(Crowd().learned()).items():
        section = section_of(key)
        assert section is not None
        assert len(text.encode()) <= section.bound, key


def test_a_state_from_measurements_is_read_back_as_it_was() -> None:
    loop = loop_over()
    loop.polls(8)
    learned = loop.memory.learned
    assert learned.costs
    assert learned.acceptance
    stored = parse_state(render_state(learned), "u1")
    assert stored is not None
    assert same(stored, learned.model_copy(update={"format": 2}))
    assert stored.acceptance == learned.acceptance, "these are rounded to six digits before"


def test_equal_content_gives_equal_text_also_after_a_restart() -> None:
    """Else each restart of the operator would write every ConfigMap again."""
    learned = Crowd().learned()
    data = render_state(learned)
    restarted = parse_state(data, "u")
    assert restarted is not None
    assert render_state(restarted) == data


def test_a_change_of_one_section_leaves_the_text_of_the_others() -> None:
    learned = Crowd().learned()
    before, after = render_state(learned), render_state(learned.model_copy(update={"swept_at": 5.0}))
    assert {key for key in before if before[key] != after[key]} == {"plan"}


# --- too long -------------------------------------------------------------------------------------------------------


def test_the_least_visited_step_times_of_parked_drafts_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = Crowd().learned()
    monkeypatch.setattr(learned_module, "MAX_STATE_BYTES", size(render_state(learned)) - 1000)
    rendered = write_state(learned)
    assert list(rendered.dropped) == ["step times of parked drafts"]
    assert json.loads(rendered.data["meta"])["dropped"] == rendered.dropped
    stored = parse_state(rendered.data, "u")
    assert stored is not None
    assert len(stored.costs) == len(learned.costs)
    assert stored.rows == learned.rows
    visits = [cell.values[0] for parked in stored.parked for cell in parked.costs]
    before = sorted((cell.values[0] for parked in learned.parked for cell in parked.costs), reverse=True)
    assert len(before) - len(visits) == rendered.dropped["step times of parked drafts"]
    assert sorted(visits, reverse=True) == before[: len(visits)]


def test_then_pods_go_and_rows_and_acceptance_of_the_current_draft_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = Crowd().learned(pods=60)
    sick = learned.pods[0].model_copy(update={"collapsed_since": 5.0})
    learned = learned.model_copy(update={"pods": (sick, *learned.pods[1:])})
    monkeypatch.setattr(learned_module, "MAX_STATE_BYTES", 20_000)
    stored = parse_state(render_state(learned), "u")
    assert stored is not None
    assert stored.rows == learned.rows
    assert stored.acceptance == learned.acceptance
    assert stored.pods == (sick,)
    assert not stored.parked


# --- damage, other versions, other deployments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 1, "pods": 7}', '{"version": 9}', '{"version":1,"encoding":"zlib","data":"AAAA"}'],
)
@pytest.mark.parametrize("key", ["pods", "plan", "estimates", "template", draft_key("2" * 16)])
def test_a_damaged_section_is_left_out_alone(key: str, text: str) -> None:
    learned = LEARNED
    text = text.replace("pods", {"pods": "pods", "plan": "rows", "estimates": "costs"}.get(key, "template"))
    stored = read_state({**WRITTEN, key: text}, "u")
    assert len(stored.problems) == 1
    assert key in stored.problems[0]
    assert stored.learned is not None
    lost = {"pods": {"pods"}, "plan": {"rows"}, "estimates": {"costs", "prefill", "traffic", "load"}}
    lost |= {"template": {"template"}, draft_key("2" * 16): {"parked"}}
    changed = {
        name
        for name in LearnedState.model_fields
        if not same(getattr(stored.learned, name), getattr(learned, name)) and name != "costs"
    }
    assert changed == lost[key] - {"costs"}


@pytest.mark.parametrize("text", [None, "{", '{"version": 9}'])
def test_without_meta_the_owner_reference_says_whose_state_it_is(text: str | None) -> None:
    loop = loop_over()
    loop.polls(8)
    data = render_state(loop.memory.learned)
    del data["meta"]
    if text:
        data["meta"] = text
    assert read_state(data, "u1").learned is None
    stored = read_state(data, "u1", is_owned=True).learned
    assert stored is not None
    assert (stored.uid, stored.draft) == ("u1", "d1"), "the plan says which draft it is for"
    assert stored.acceptance == loop.memory.learned.acceptance


@pytest.mark.parametrize(
    "costs", [7, [7], [{}], [{"values": ["="], "draft_passes": 1}], {"rows": 1, "columns": {"a": 7}}]
)
def test_garbage_in_a_packed_section_is_a_problem_and_no_error(costs: Any) -> None:
    text = encode(1, {"costs": costs, "wander": 0.5, "filler": "x" * 5000})
    stored = read_state({**render_state(LearnedState(uid="u", pin="none")), "estimates": text}, "u")
    assert stored.learned is not None
    assert stored.learned.pin == "none"
    assert len(stored.problems) == 1


def test_another_deployment_of_the_same_name_starts_from_nothing() -> None:
    data = render_state(LearnedState(uid="old"))
    assert parse_state(data, "new") is None
    assert read_state(data, "new", is_owned=True).learned is None


def test_fields_of_a_newer_operator_are_ignored() -> None:
    data = render_state(LearnedState(uid="u", pin="none"))
    data["plan"] = data["plan"].replace('"version":1', '"version":1,"mood":"good"')
    stored = parse_state(data, "u")
    assert stored is not None
    assert stored.pin == "none"


def test_a_section_cannot_set_the_fields_of_another() -> None:
    data = render_state(LearnedState(uid="u", pin="none"))
    data["scaling"] = '{"version":1,"pin":"chain:3","startup_seconds":7}'
    stored = parse_state(data, "u")
    assert stored is not None
    assert (stored.pin, stored.startup_seconds) == ("none", 7)


def test_sections_of_a_newer_operator_are_handed_back() -> None:
    stored = read_state({**render_state(LearnedState(uid="u")), "cache": '{"version":1}'}, "u")
    assert stored.unknown == {"cache": '{"version":1}'}
    assert not stored.problems


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": 7}'])
def test_garbage_alone_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="valid"):
        parse_state({"memory.json": text}, "u")
    with pytest.raises(ValueError, match="valid"):
        parse_state({"meta": text}, "u")


def test_the_format_before_sections_is_migrated() -> None:
    loop = loop_over()
    loop.polls(8)
    learned = loop.memory.learned
    assert learned.template is not None
    old = learned.model_dump_json(by_alias=True).replace('"format":2', '"format":1')
    data = {"memory.json": old, "template.json": learned.template.model_dump_json(), "applied.json": "{}"}
    stored = read_state(data, "u1")
    assert stored.learned == learned
    assert not stored.unknown
    assert read_state(data, "u2").learned is None


def test_every_field_of_the_state_has_one_section() -> None:
    """A field without a section would be lost with each restart."""
    own_sections = {"template", "parked", "acceptance", "requests", "format", "uid", "draft"}
    fields = [name for section in SECTIONS for name in section.fields]
    assert len(fields) == len(set(fields))
    assert {*fields, *own_sections} == set(LearnedState.model_fields)
