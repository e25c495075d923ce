"""Logprobs equal those of a plain forward pass, with and without speculation, for the requests that set them only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdecode_worker.contract import SyntheticKnobs, TreeShape
from specdecode_worker.core.messages import Logprobs, Submit, Tokens
from specdecode_worker.sampling.params import Sampling
from support.lossless.plain_decoding import PlainDecoding
from support.lossless.small_requests import plan_of
from support.small_llama import emitted, texts
from support.tiers import covering

NEAR = 1e-4
SHAPES = [TreeShape.parse(text) for text in ("tree:4,2,1", "chain:5", "none", "tree:2,2,2")]


def request(index: int, **sampling: Any) -> Submit:
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(0, 61, (1 + 17 * index % 60,), generator=generator).tolist()
    fields = {"max_tokens": 25, "seed": index, "temperature": 0.8 * (index % 2), "logprobs": 3, **sampling}
    return Submit(
        request_id=str(index), prompt=tuple(prompt), sampling=Sampling(**fields), task=f"t{index % len(SHAPES)}"
    )


def is_correct(entry: Logprobs, token: int, logits_V: torch.Tensor, top: int) -> bool:
    logp = torch.log_softmax(logits_V, dim=-1)
    order = logp.sort(descending=True, stable=True)
    return (
        entry.token == token
        and abs(entry.logprob - float(logp[token])) < NEAR
        and entry.rank == 1 + int((logp > logp[token]).sum())
        and list(entry.top_tokens) == order.indices[:top].tolist()
        and torch.allclose(torch.tensor(entry.top_logprobs).double(), order.values[:top], atol=NEAR)
    )


def all_correct(reference: PlainDecoding, submit: Submit, messages: list[Tokens]) -> bool:
    tokens = [token for new in messages for token in new.tokens]
    logprobs = [entry for new in messages for entry in new.logprobs]
    logits = reference.logits([*submit.prompt, *tokens])[len(submit.prompt) - 1 :]
    top = submit.sampling.logprobs
    assert top is not None
    assert len(logprobs) == len(tokens)
    return all(is_correct(*entry, top) for entry in zip(logprobs, tokens, logits, strict=False))


ODD: dict[str, Any] = {"presence_penalty": 1.0, "logit_bias": ((3, 2.0),), "top_k": 5, "min_p": 0.05}


@pytest.mark.parametrize(("draft", "cuts"), [("copy", None), ("copy", (0.7, 0.4)), (None, None)], ids=str)
def test_logprobs_of_emitted_tokens(
    make_engine: Any, reference: PlainDecoding, draft: str | None, cuts: tuple[float, ...] | None
) -> None:
    """Logprobs of emitted tokens are those of the raw logits, before processors and temperature.

    Trees, chains and plain rows share a batch. ``cuts`` are synthetic acceptances, which shorten paths.
    """
    engine = make_engine(draft, plan=plan_of(SHAPES) if draft else None)
    engine.set_synthetic(SyntheticKnobs(acceptance=cuts))
    requests = [request(i, logprobs=i % 4, **(ODD if i % 3 == 0 else {})) for i in range(8)]
    messages_by_request = emitted(engine, requests)
    for submit in requests:
        assert all_correct(reference, submit, messages_by_request[submit.request_id])
    if draft and not cuts:
        assert max(len(new.tokens) for messages in messages_by_request.values() for new in messages) >= 3


@pytest.mark.parametrize("pipelined", [False, True], ids=["in-turn", "pipelined"])
def test_logprobs_of_graphs(make_engine: Any, reference: PlainDecoding, pipelined: bool) -> None:
    """Logprobs of a captured step are those of the raw logits; a request that wants too many has no graph."""
    engine = make_engine("copy", graphs=(2, 8), pipelined=pipelined, plan=plan_of(SHAPES))
    requests = [request(i, logprobs=i % 4, **(ODD if i % 3 == 0 else {})) for i in range(8)]
    messages_by_request = emitted(engine, requests)
    assert all(all_correct(reference, submit, messages_by_request[submit.request_id]) for submit in requests)
    assert set(engine._graphs.eager) == {"prefill"}
    assert any(key.features.logprobs for key in engine._graphs._graphs)
    many = request(9, logprobs=30)
    assert all_correct(reference, many, emitted(engine, [many])["9"])
    assert engine._graphs.eager["logprobs"] > 0


@pytest.mark.parametrize("graphs", [(), (2,)], ids=["eager", "graphs"])
def test_request_without_logprobs_gets_none(
    make_engine: Any, reference: PlainDecoding, graphs: tuple[int, ...]
) -> None:
    engine = make_engine("copy", graphs=graphs, plan=plan_of(SHAPES))
    requests = [request(0), request(1, logprobs=None)]
    messages_by_request = emitted(engine, requests)
    assert all_correct(reference, requests[0], messages_by_request["0"])
    assert not any(new.logprobs or new.prompt_logprobs for new in messages_by_request["1"])


def test_logprobs_after_a_stop_are_cut_like_tokens(make_engine: Any, reference: PlainDecoding) -> None:
    engine = make_engine("copy", plan=plan_of([SHAPES[0]] * 4))
    requests = [request(i, stop_token_ids=tuple(range(0, 61, 4))) for i in range(8)]
    messages_by_request = emitted(engine, requests)
    assert {messages[-1].finish for messages in messages_by_request.values()} == {"stop"}
    for submit in requests:
        assert all_correct(reference, submit, messages_by_request[submit.request_id])


@pytest.mark.parametrize("pipelined", [False, True], ids=["in-turn", "pipelined"])
def test_prompt_logprobs_across_chunks_and_preemptions(
    make_engine: Any, reference: PlainDecoding, pipelined: bool
) -> None:
    """The first emitted token carries the logprobs of every prompt token but the first, each exactly once."""
    engine = make_engine("copy", max_num_seqs=4, blocks=9, budget=20, pipelined=pipelined, plan=plan_of(SHAPES))
    requests = [request(i, prompt_logprobs=2 if i % 3 else None, max_tokens=30) for i in range(8)]
    messages_by_request = emitted(engine, requests)
    assert engine.report().preemptions > 0
    for submit in requests:
        messages = messages_by_request[submit.request_id]
        assert all_correct(reference, submit, messages)
        assert not any(new.prompt_logprobs for new in messages[1:])
        wanted = submit.prompt[1:] if submit.sampling.prompt_logprobs else ()
        assert len(messages[0].prompt_logprobs) == len(wanted)
        logits = reference.logits(list(submit.prompt))
        assert all(is_correct(*one, 2) for one in zip(messages[0].prompt_logprobs, wanted, logits, strict=False))


# Speculative text equals plain text with every processor on, because processors follow the paths of the tree.


TOKENS, VOCABULARY = 30, 61
PROCESSORS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.15},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": ((5, 3.0), (9, -100.0), (17, 2.0), (33, 1.5))},
    "min_tokens": {"min_tokens": 14, "stop_token_ids": tuple(range(0, VOCABULARY, 3))},
}
PROCESSORS["all"] = {name: value for fields in PROCESSORS.values() for name, value in fields.items()}
PROCESSORS["all"] |= {"top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.4}
PROCESSORS["allowed"] = {"allowed_token_ids": tuple(range(1, 40, 2)), "repetition_penalty": 1.5}
PROCESSORS_SHAPES = [
    TreeShape.parse(text) for text in ("chain:4", "tree:4,2,1", "tree:2,2,2", "0,0,1,1,2", "none", "chain:1")
]


def request_of_processors(index: int, name: str | None, *, sampled: bool, task: int = 0) -> Submit:
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(0, VOCABULARY, (1 + 11 * index % 40,), generator=generator).tolist()
    fields = dict(PROCESSORS[name]) if name else {}
    sampling = Sampling(
        max_tokens=TOKENS, seed=700 + index, temperature=(1.0, 0.7, 1.3)[index % 3] if sampled else 0.0, **fields
    )
    return Submit(request_id=f"{index}", prompt=tuple(prompt), sampling=sampling, task=f"t{task}")


@pytest.mark.parametrize(
    ("name", "shape", "sampled"),
    [
        *covering([name for name in PROCESSORS if name != "min_p"], PROCESSORS_SHAPES[:2], [False, True]),
        *(("min_p", shape, True) for shape in PROCESSORS_SHAPES[:2]),
    ],
    ids=str,
)
def test_single_sequences_equal_plain_decoding(
    make_engine: Any, reference: PlainDecoding, shape: TreeShape, name: str, sampled: bool
) -> None:
    engine = make_engine("copy", max_num_seqs=1, plan=plan_of([shape]))
    requests = [request_of_processors(i, name, sampled=sampled) for i in range(3)]
    wanted = reference.texts(requests)
    assert texts(engine, requests) == wanted
    without = [reference.text(request_of_processors(i, None, sampled=sampled)) for i in range(3)]
    assert list(wanted.values()) != without, "the processor must change something"
    report = engine.report()
    assert 1 + report.accepted_tokens / report.drafts >= 1.2, "paths must be walked to test anything"


# Prompt, seed and shape follow from the place in PROCESSORS: an entry elsewhere than at its end changes all behind it.
MIXED = [(i, name, bool(i % 2) or name == "min_p") for i, name in enumerate([*PROCESSORS, None, "all"])]


def mixed_batch() -> list[Submit]:
    """Return requests with every processor, greedy and sampled, in mixed shapes, and one without processors."""
    return [
        request_of_processors(i, name, sampled=sampled, task=i % len(PROCESSORS_SHAPES)) for i, name, sampled in MIXED
    ]


@pytest.mark.parametrize("draft", ["copy", "eagle3", "peagle", "dflash", "medusa", "draft-model", "ngram", "suffix"])
def test_mixed_batch_equals_plain_decoding(make_engine: Any, reference: PlainDecoding, draft: str) -> None:
    engine = make_engine(draft, max_num_seqs=10, plan=plan_of(PROCESSORS_SHAPES))
    assert texts(engine, mixed_batch()) == reference.texts(mixed_batch())


@pytest.mark.parametrize("draft", ["copy", "eagle3", "medusa", "peagle"])
def test_mixed_batch_in_graphs_equals_plain_decoding(make_engine: Any, reference: PlainDecoding, draft: str) -> None:
    """The draft proposes as in eager steps, under the same processors."""
    reports = []
    for graphs in ((4, 10), ()):
        engine = make_engine(draft, max_num_seqs=10, graphs=graphs, plan=plan_of(PROCESSORS_SHAPES))
        assert texts(engine, mixed_batch()) == reference.texts(mixed_batch())
        report = engine.report()
        reports.append((report.drafts, report.accepted_tokens))
        if graphs:
            assert set(engine._graphs.eager) == {"prefill"}
            assert not set(engine._graphs.outside) - {"catch-up"}
            assert {key.features.adjusts for key in engine._graphs._graphs} >= {8, 64}
    assert reports[0] == reports[1]


@pytest.mark.parametrize("pipelined", [False, True], ids=["in-turn", "pipelined"])
def test_chunks_and_preemptions(make_engine: Any, reference: PlainDecoding, pipelined: bool) -> None:
    """Tokens emitted before a preemption still count as the answer, although they are recomputed like a prompt."""
    engine = make_engine(
        "copy", max_num_seqs=5, blocks=10, budget=24, pipelined=pipelined, plan=plan_of(PROCESSORS_SHAPES)
    )
    assert texts(engine, mixed_batch()) == reference.texts(mixed_batch())
    assert engine.report().preemptions > 0, "the test must make the blocks run out"
