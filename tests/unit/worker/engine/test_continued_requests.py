"""Requests that continue the output of another worker: same text at every token, and nothing is counted twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from specdecode_worker.core.messages import Submit
from support.worker.accounts import check_engine
from support.worker.small_engine import drain, plan_of, small_engine, submit, texts

PROMPT = tuple(range(1, 20))
TOKENS = 12
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 12},
    "penalties": {
        "temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2,
    },
    "min_tokens": {"temperature": 1.1, "min_tokens": 6, "stop_token_ids": tuple(range(0, 41, 3))},
    "logprobs": {"temperature": 0.9, "logprobs": 2},
}  # fmt: skip


def request(name: str, **fields: Any) -> Submit:
    return submit(name, PROMPT, **{"max_tokens": TOKENS, **fields})


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("shape", ["none", "chain:3", "tree:2,2"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_rest_of_the_text_is_the_same_at_every_token(name: str, shape: str, pipelined: bool) -> None:
    engine = small_engine(pipelined=pipelined, eos=(7,))
    engine.set_plan(plan_of(shape))
    engine.add(request("whole", **SAMPLINGS[name]))
    messages = drain(engine)
    text, logprobs = texts(messages)["whole"], [one for message in messages for one in message.logprobs]
    for count in range(len(text)):
        engine.add(msgspec.structs.replace(request(str(count), **SAMPLINGS[name]), emitted=tuple(text[:count])))
    rest = drain(engine)
    assert texts(rest) == {str(count): text[count:] for count in range(len(text))}
    for count in range(len(text)):
        own = [one for message in rest if message.request_id == str(count) for one in message.logprobs]
        assert [one.token for one in own] == [one.token for one in logprobs[count:]]
        assert [one.logprob for one in own] == pytest.approx([one.logprob for one in logprobs[count:]])
    check_engine(engine)


def test_continued_request_is_not_counted_again() -> None:
    engine = small_engine()
    engine.add(request("first"))
    text = texts(drain(engine))["first"]
    before = engine.report()
    engine.add(msgspec.structs.replace(request("second"), emitted=tuple(text[:5])))
    engine.add(msgspec.structs.replace(request("third"), emitted=()))
    drain(engine)
    after = engine.report()
    (traffic,), (was,) = after.traffic, before.traffic
    assert (traffic.arrivals, traffic.prompt_tokens) == (was.arrivals, was.prompt_tokens)
    assert traffic.finished == was.finished + 2
    assert traffic.output_tokens == was.output_tokens + 2 * TOKENS - 5
    counts = {cell.name: (sum(cell.counts), sum(one.counts)) for cell, one in zip(
        before.latency, after.latency, strict=True)}  # fmt: skip
    assert {name: now - then for name, (then, now) in counts.items() if name != "ttit"} == {
        "ttft": 0, "e2e": 0, "queue": 0,
    }  # fmt: skip
    then, now = counts["ttit"]
    assert now - then == (TOKENS - 5 - 1) + (TOKENS - 1), "the gap between the workers is no latency between tokens"


def test_continued_requests_go_before_new_ones_and_have_no_queue_deadline() -> None:
    engine = small_engine(max_num_seqs=1)
    engine.add(request("first"))
    text = texts(drain(engine))["first"]
    engine.add(request("running"))
    engine.step()
    engine.add(request("new"))
    continued = msgspec.structs.replace(request("continued"), emitted=tuple(text[:5]), queue_deadline_seconds=0.001)
    engine.add(continued)
    order = [message.request_id for message in drain(engine) if message.finish]
    assert order == ["running", "continued", "new"]


@pytest.mark.parametrize(
    ("emitted", "reason"),
    [((4,) * TOKENS, "complete"), ((4, 9), "complete"), ((99,), "outside"), ((-1,), "outside")],
)
def test_nothing_to_continue_is_refused(emitted: tuple[int, ...], reason: str) -> None:
    engine = small_engine(eos=(9,))
    with pytest.raises(ValueError, match=reason):
        engine.add(msgspec.structs.replace(request("r"), emitted=emitted))
    assert engine.idle
