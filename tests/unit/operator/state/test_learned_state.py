"""Sections of the state ConfigMap: round trip, bound, damage, migration, sections of a newer operator."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from fleet import loop_over
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.state import learned as learned_module
from specdecode_operator.state.cells import Stored
from specdecode_operator.state.compact import encode
from specdecode_operator.state.learned import (
    MAX_STATE_BYTES,
    AcceptanceCell,
    DraftEstimates,
    LearnedState,
    LoadState,
    PodState,
    PodTaskState,
    RequestCell,
    RowState,
    StepTimeCell,
    TemplateState,
    TrafficCell,
    parse_state,
    read_state,
    render_state,
    write_state,
)
from specdecode_operator.state.sections import MAX_PARKED_DRAFTS, SECTIONS, draft_key, section_of
from specdecode_operator.state.session import PackedSession
from specdecode_operator.telemetry.counters import PAIRS
from specdecode_worker.contract import MAX_RANKS

NOW = 1_764_000_000.0
TASKS = tuple(f"task-{index}-{'x' * 24}" for index in range(8))
SEQUENCES, CONTEXTS, DEPTH = 64, 2, 8


class Crowd:
    """Random estimates for 8 tasks, 64 sequences and 2 contexts: every cell that a deployment can have."""

    def __init__(self, seed: int = 1) -> None:
        self.random = random.Random(seed)

    def number(self, most: float, digits: int = 6) -> float:
        return float(f"{self.random.random() * most:.{digits}g}")

    def time(self) -> float:
        return NOW + round(self.random.random() * 1e5, 3)

    def moments(self, sequences: int, passes: int) -> tuple[float, ...]:
        """Sums over steps of different sizes, as a worker that is not simulated has them."""
        sums = [0.0] * (4 + 2 * 6 + len(PAIRS))
        for _ in range(8):
            weight, size = self.random.random() + 0.01, self.random.uniform(0.6, 1) * sequences
            seconds = self.random.uniform(0.01, 0.05)
            x = (1, size, size * (passes + 1), size * self.random.uniform(100, 1000), passes, 0)
            products = (x[row] * x[column] for row, column in PAIRS)
            step = (1, seconds, seconds**2, 2 * size, *x, *(value * seconds for value in x), *products)
            sums = [total + weight * value for total, value in zip(sums, step, strict=True)]
        return tuple(float(f"{total:.6g}") for total in sums)

    def costs(self, least_passes: int, *, are_new: bool) -> tuple[StepTimeCell, ...]:
        return tuple(
            StepTimeCell(
                tokens_bucket=1 << bucket,
                draft_passes=passes,
                prefill=False,
                context_bucket=context,
                values=self.moments(1 << min(bucket, 6), passes),
                new_values=self.moments(4, passes) if are_new else (),
                at=self.time(),
                polls=self.number(9),
                spells=self.number(9),
                spell_at=self.time() if are_new else 0,
                changed_at=self.time() if are_new else 0,
                made_up=self.number(24),
            )
            for bucket in range((SEQUENCES * (DEPTH + 1)).bit_length() + 1)
            for passes in range(least_passes, DEPTH + 1)
            for context in range(CONTEXTS)
            if passes < 1 << bucket <= 2 * SEQUENCES * (DEPTH + 1)
        )

    def acceptance(self, *, are_new: bool) -> tuple[AcceptanceCell, ...]:
        parents: Any = ("main", "sibling")
        return tuple(
            AcceptanceCell(
                task=task,
                depth=depth,
                parent=parent,
                hits=self.number(300),
                total=self.number(600),
                at=self.time(),
                new_hits=self.number(30) if are_new else 0,
                new_total=self.number(60) if are_new else 0,
                changed_at=self.time() if are_new else 0,
                ranks=tuple(self.number(100, 3) for _ in range(MAX_RANKS - 1)),
            )
            for task in TASKS
            for depth in range(1, DEPTH + 1)
            for parent in parents
        )

    def rows(self, *, are_new: bool) -> tuple[RowState, ...]:
        return tuple(
            RowState(
                concurrency=concurrency,
                context=context,
                task=task,
                depth=self.random.randint(0, DEPTH),
                parents=(0, 0, 1, 1, 2, 3) if self.random.random() < 0.5 else (),
                since=self.time(),
                off_until=self.time(),
                patience=self.number(3600),
                moves=tuple(self.time() for _ in range(3)) if are_new else (),
                no_trial_until=self.time(),
                trial_patience=self.number(3600),
            )
            for concurrency in range(SEQUENCES.bit_length())
            for context in range(CONTEXTS)
            for task in TASKS
        )

    def requests(self) -> tuple[RequestCell, ...]:
        numbers: Any = [tuple(self.number(1e4) for _ in range(6)) for _ in TASKS]
        return tuple(RequestCell(task=task, sums=sums) for task, sums in zip(TASKS, numbers, strict=True))

    def parked(self, draft: str) -> DraftEstimates:
        return DraftEstimates(
            draft=draft,
            acceptance=self.acceptance(are_new=False),
            requests=self.requests(),
            costs=self.costs(1, are_new=False),
            rows=self.rows(are_new=False),
        )

    def pods(self, count: int) -> tuple[PodState, ...]:
        return tuple(
            PodState(
                uid=f"{self.random.getrandbits(128):032x}",
                boot=f"{self.random.getrandbits(128):032x}",
                draft="0" * 16,
                tasks=tuple(
                    PodTaskState(
                        task=task,
                        hits=self.number(99),
                        total=self.number(99),
                        past_hits=self.number(99),
                        past_total=self.number(99),
                    )
                    for task in TASKS
                ),
                pace=self.number(1),
                at=self.time(),
            )
            for _ in range(count)
        )

    def learned(self, *, pods: int = 8) -> LearnedState:
        sums: Any = [tuple(self.number(1e6) for _ in range(5)) for _ in TASKS]
        return LearnedState(
            uid="u",
            draft="0" * 16,
            rows=self.rows(are_new=True),
            acceptance=self.acceptance(are_new=True),
            requests=self.requests(),
            traffic=tuple(TrafficCell(task=task, sums=row) for task, row in zip(TASKS, sums, strict=True)),
            costs=self.costs(0, are_new=True),
            prefill=self.moments(8, 0),
            load=LoadState(sequences=3.25, at=NOW),
            pods=self.pods(pods),
            parked=tuple(self.parked(f"{index + 1}" * 16) for index in range(MAX_PARKED_DRAFTS)),
            template=TemplateState(spec_hash="h", template={"containers": [{"name": "worker"}]}, image="i"),
        )


def size(data: dict[str, str]) -> int:
    return sum(len(text.encode()) for text in data.values())


def same(left: Any, right: Any) -> bool:
    """Compare states, numbers to within four digits."""
    if isinstance(left, Stored):
        return type(left) is type(right) and same(
            [getattr(left, name) for name in type(left).model_fields],
            [getattr(right, name) for name in type(left).model_fields],
        )
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= 5e-5 * max(abs(left), abs(right))
    return bool(left == right)


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


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.floats(0, 2e9) | st.just(0.0)
names = st.text(max_size=12)
drafts = st.text(max_size=70)
cell_records = st.builds(
    StepTimeCell,
    tokens_bucket=st.integers(0, 4096),
    draft_passes=st.integers(0, 9),
    prefill=st.booleans(),
    context_bucket=st.integers(0, 3),
    values=st.just(()) | st.lists(numbers, min_size=37, max_size=37).map(tuple),
    new_values=st.just(()) | st.lists(numbers, max_size=3).map(tuple),
    at=numbers,
    made_up=numbers,
)
acceptance_records = st.builds(
    AcceptanceCell,
    task=names,
    depth=st.integers(1, 16),
    hits=numbers,
    total=numbers,
    at=numbers,
    parent=st.sampled_from(["main", "sibling"]),
    ranks=st.lists(numbers, max_size=8).map(tuple),
)
row_records = st.builds(
    RowState,
    concurrency=st.integers(0, 10),
    context=st.integers(0, 2),
    task=names,
    depth=st.integers(0, 16),
    since=numbers,
    parents=st.lists(st.integers(0, 5), max_size=6).map(tuple),
    moves=st.lists(numbers, max_size=4).map(tuple),
    stays=st.booleans(),
)
request_records = st.builds(RequestCell, task=names, sums=st.tuples(*[numbers] * 6))


def many(records: Any) -> Any:
    return st.lists(records, max_size=12).map(tuple)


def drafted(cells: tuple[StepTimeCell, ...]) -> tuple[StepTimeCell, ...]:
    return tuple(cell for cell in cells if cell.draft_passes)


estimates = st.builds(
    DraftEstimates,
    draft=drafts,
    acceptance=many(acceptance_records),
    requests=many(request_records),
    costs=many(cell_records).map(drafted),
    rows=many(row_records),
)
states = st.builds(
    LearnedState,
    uid=st.just("u"),
    draft=drafts,
    rows=many(row_records),
    acceptance=many(acceptance_records),
    requests=many(request_records),
    costs=many(cell_records),
    traffic=many(st.builds(TrafficCell, task=names, sums=st.tuples(*[numbers] * 5))),
    prefill=st.just(()) | st.lists(numbers, min_size=37, max_size=37).map(tuple),
    wander=numbers,
    pods=many(
        st.builds(PodState, uid=names, pace=st.none() | numbers, tasks=many(st.builds(PodTaskState, task=names)))
    ),
    recycled_at=st.none() | numbers,
    pin=names,
    parked=st.lists(estimates, max_size=4, unique_by=lambda one: one.draft).map(tuple),
)


def by_kind(cells: tuple[StepTimeCell, ...]) -> list[StepTimeCell]:
    return sorted(
        cells,
        key=lambda cell: (
            cell.tokens_bucket,
            cell.draft_passes,
            cell.prefill,
            cell.context_bucket,
            cell.at,
            cell.values,
        ),
    )


@settings(max_examples=80)
@given(states)
def test_any_state_survives_the_round_trip(learned: LearnedState) -> None:
    parked = tuple(one for one in learned.parked if one.draft != learned.draft)
    learned = learned.model_copy(update={"parked": parked})
    data = render_state(learned)
    stored = parse_state(data, "u")
    assert stored is not None
    assert same(by_kind(stored.costs), by_kind(learned.costs))
    assert same(stored, learned.model_copy(update={"costs": stored.costs}))
    assert all(len(key) <= 253 and key.replace(".", "").replace("-", "").replace("_", "").isalnum() for key in data)


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
    learned = Crowd().learned()
    text = text.replace("pods", {"pods": "pods", "plan": "rows", "estimates": "costs"}.get(key, "template"))
    stored = read_state({**render_state(learned), key: text}, "u")
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


@settings(max_examples=150)
@given(st.sampled_from(sorted(render_state(Crowd().learned(pods=1)))), st.randoms(use_true_random=False))
def test_no_damage_raises(key: str, chance: random.Random) -> None:
    data = dict(_DATA)
    text = list(data[key])
    for _ in range(3):
        text[chance.randrange(len(text))] = chance.choice('{}[]",:0aZ=')
    data[key] = "".join(text)
    read_state(data, "u", is_owned=True)


_DATA = render_state(Crowd().learned(pods=1))


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


# --- packed in the process --------------------------------------------------------------------------------------------


def test_a_packed_session_is_small_and_unpacks_as_it_was() -> None:
    loop = loop_over()
    loop.polls(8)
    crowd = Crowd()
    template = TemplateState(spec_hash="h", template={"x": "y" * 19_000}, image="i")
    learned = loop.memory.learned.model_copy(update={"template": template, "parked": (crowd.parked("d2"),)})
    session = replace(loop.memory, learned=learned, published_at=7.0, found=False)
    packed = PackedSession.of(session)
    assert packed.session == session
    assert len(packed.learned) < len(learned.model_dump_json()) / 3


def test_unchanged_parked_estimates_are_not_packed_again() -> None:
    session = replace(loop_over().memory, learned=LearnedState(uid="u", parked=(Crowd().parked("d2"),)))
    first = PackedSession.of(session)
    later = replace(first.session, published_at=9.0)
    assert PackedSession.of(later, first).parked is first.parked
    changed = later.learned.model_copy(update={"parked": (Crowd(2).parked("d2"),)})
    assert PackedSession.of(replace(later, learned=changed), first).session.learned == changed
