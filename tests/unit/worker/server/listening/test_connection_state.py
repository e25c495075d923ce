"""Tests of the deadlines of one connection."""

from __future__ import annotations

import pytest

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.listening import ConnectionState, Cut

LIMITS = ServerConfig(header_timeout_seconds=10 / 0.95, body_timeout_seconds=30 / 0.95, write_timeout_seconds=20)


def overdue(state: ConnectionState, now: float) -> Cut | None:
    return state.overdue(now, LIMITS)


@pytest.fixture
def state() -> ConnectionState:
    """Return a connection accepted at time 0."""
    return ConnectionState(now=0)


@pytest.fixture
def answering(state: ConnectionState) -> ConnectionState:
    """Return a connection whose request is whole at time 1."""
    state.begin_request(1)
    state.has_headers = True
    state.complete_request(1, answered=False)
    return state


def test_silent_connection_has_the_time_of_headers(state: ConnectionState) -> None:
    assert overdue(state, 10) is None
    assert overdue(state, 10.1) is Cut.HEADERS_LATE


def test_first_byte_does_not_extend_the_deadline(state: ConnectionState) -> None:
    state.begin_request(9)
    assert overdue(state, 10.1) is Cut.HEADERS_LATE
    state.has_headers = True
    assert overdue(state, 30) is None
    assert overdue(state, 30.1) is Cut.BODY_LATE


def test_served_request_has_no_deadline(answering: ConnectionState) -> None:
    assert overdue(answering, 10_000) is None


def test_idle_connection_is_closed_and_a_new_request_has_its_own_deadline(answering: ConnectionState) -> None:
    answering.complete_response(100)
    assert overdue(answering, 175) is None
    assert overdue(answering, 175.1) is Cut.IDLE
    answering.begin_request(170)
    assert overdue(answering, 180) is None
    assert overdue(answering, 180.1) is Cut.HEADERS_LATE


def test_response_before_the_end_of_the_request_keeps_the_deadline(state: ConnectionState) -> None:
    state.begin_request(0)
    state.has_headers = True
    state.complete_response(1)
    assert overdue(state, 30.1) is Cut.BODY_LATE
    state.complete_request(2, answered=True)
    assert overdue(state, 70) is None
    assert overdue(state, 77.1) is Cut.IDLE


def test_output_above_the_high_water_mark_must_be_read_in_time(answering: ConnectionState) -> None:
    answering.pause_writing(5)
    for now in range(5, 25):
        answering.observe_unsent(70_000 - now, now)  # a byte a second is no progress
        assert overdue(answering, now) is None
    assert overdue(answering, 25.1) is Cut.UNREAD
    answering.resume_writing(25)
    assert overdue(answering, 45) is None


def test_small_unsent_output_may_stay_while_it_shrinks(answering: ConnectionState) -> None:
    for now, size in ((2, 500), (20, 700), (21, 600), (40, 900)):
        answering.observe_unsent(size, now)
        assert overdue(answering, now) is None
    assert overdue(answering, 41.1) is Cut.UNREAD
    answering.observe_unsent(0, 42)
    assert overdue(answering, 1000) is None


def test_rest_of_a_complete_response_must_be_read_whole(answering: ConnectionState) -> None:
    answering.observe_unsent(500, 2)
    answering.complete_response(10)
    for now in range(11, 30):
        answering.observe_unsent(500 - now, now)
        assert overdue(answering, now) is None
    assert overdue(answering, 30.1) is Cut.UNREAD


def test_configured_timeouts_end_a_little_early(state: ConnectionState) -> None:
    config = ServerConfig(header_timeout_seconds=10, body_timeout_seconds=30)
    assert state.overdue(9.5, config) is None
    assert state.overdue(9.6, config) is Cut.HEADERS_LATE
    state.has_headers = True
    assert state.overdue(28.5, config) is None
    assert state.overdue(28.6, config) is Cut.BODY_LATE


def test_headers_and_framing_are_bounded(state: ConnectionState) -> None:
    state.begin_request(0)
    state.received_bytes = 64 * 1024
    assert not state.has_too_much_framing
    state.received_bytes += 1
    assert state.has_too_much_framing
    state.begin_request(1)
    state.received_bytes, state.body_bytes = 600_000, 100_000  # chunks of one byte
    assert not state.has_too_much_framing
    state.received_bytes += 400_000
    assert state.has_too_much_framing
    state.complete_request(2, answered=False)
    assert not state.has_too_much_framing
