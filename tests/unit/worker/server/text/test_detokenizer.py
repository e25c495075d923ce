"""Tests of the answer reader: text of tokens, and log-probabilities of the visible text only."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdecode_worker.core.messages import Logprobs, Tokens
from specdecode_worker.server.requests import CompletionRequest
from specdecode_worker.server.responses import ChoiceDetokenizer, ChoicePiece
from specdecode_worker.server.tools import Tokenizer

END = 257
fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="p", **fields)


def read(tokenizer: Tokenizer, ids: list[int], cuts: set[int], reading: CompletionRequest) -> list[ChoicePiece]:
    """Return the pieces of ``ids`` and an end token, received in steps that are split at ``cuts``."""
    ids = [*ids, END]
    reader = ChoiceDetokenizer(tokenizer, [], reading)
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
    pieces = []
    for start, end in itertools.pairwise(edges):
        step = tuple(ids[start:end])
        logprobs = tuple(Logprobs(token, -float(token), 1) for token in step)
        finish = "stop" if end == len(ids) else None
        pieces.append(reader.push(Tokens(request_id="r", tokens=step, finish=finish, logprobs=logprobs)))
        if pieces[-1].finish_reason:
            break
    return pieces


@given(text=st.text(alphabet="abé你"), cuts=st.sets(st.integers(1, 30)), stop=st.sampled_from(["", "b", "ab", "éa"]))
@fixture_is_constant
def test_output_does_not_depend_on_step_sizes(tokenizer: Tokenizer, text: str, cuts: set[int], stop: str) -> None:
    reading = request(stop=[stop] if stop else [], logprobs=0)
    pieces = read(tokenizer, tokenizer.encode(text), cuts, reading)
    shown = "".join(piece.text for piece in pieces)
    assert shown == (text.partition(stop)[0] if stop else text)
    scored = [one for piece in pieces for one in piece.scored]
    assert tokenizer.decode([one.token for one in scored]) == shown
    assert [one.offset for one in scored] == [i for i, letter in enumerate(shown) for _ in letter.encode()]
    assert all(one.logprobs is not None and one.logprobs.token == one.token for one in scored)


def test_logprobs_wait_for_the_text_that_a_stop_string_holds_back(tokenizer: Tokenizer) -> None:
    reading = request(stop=["abX"], logprobs=0)
    pieces = read(tokenizer, tokenizer.encode("1abc"), {1, 2, 3, 4}, reading)
    assert [(piece.text, len(piece.scored)) for piece in pieces] == [("1", 1), ("", 0), ("", 0), ("abc", 3), ("", 0)]


def test_output_that_ends_within_a_character_shows_that_something_was_there(tokenizer: Tokenizer) -> None:
    *beginning, _ = tokenizer.encode("a你")
    reader = ChoiceDetokenizer(tokenizer, [], request())
    pieces = [reader.push(Tokens(request_id="r", tokens=(token,), finish=None)) for token in beginning[:-1]]
    last = reader.push(Tokens(request_id="r", tokens=(beginning[-1],), finish="length"))
    assert "".join(piece.text for piece in pieces) == "a"
    assert (last.text, last.finish_reason) == ("\ufffd", "length")
