"""Speculative text equals plain text for answers that follow a grammar, whatever drafts them.

The answers end by themselves or at ``max_tokens``; either way they follow the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from char_tokenizer import END, tokenizer_json
from guided_decoding import GuidedDecoding

from specdecode_worker.contract import TreeShape
from specdecode_worker.engine.ipc.messages import Sampling, Submit, Tokens
from specdecode_worker.guided import grammars
from specdecode_worker.guided.grammar_compiler import GrammarCompiler

TOKENS, VOCABULARY = 40, 61
SCHEMA = {
    "type": "object",
    "properties": {"name_of_it": {"enum": ["abc", "abd"]}, "id": {"type": "integer"}, "tr": {"type": "boolean"}},
    "required": ["name_of_it", "id", "tr"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": grammars.json_grammar(SCHEMA),
    "compact": grammars.json_grammar(SCHEMA, white_space=False),
    "regex": grammars.regex_grammar(r"[a-f]{3,9}(-[0-9]{2})+"),
    "endless": grammars.regex_grammar(r"(ab|cd|abcdef_)*"),
    "choice": grammars.choice_grammar(["abcabc", "abcd", "true", "name"]),
    "object": grammars.json_grammar({"type": "object"}),
    "free": grammars.context_free_grammar('start: "[" item ("," item)* "]"\nitem: start | /[0-9]{1,3}/'),
    "none": "",
}
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 7},
    {"top_p": 0.8, "min_p": 0.02},
    {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"logit_bias": ((5, 3.0), (30, 4.0), (31, -100.0))},
    {"min_tokens": 12},
    {"min_tokens": 9, "stop_token_ids": (3, 19, 20)},
)
SHAPES = [TreeShape.parse(text) for text in ("chain:4", "tree:4,2,1", "tree:2,2,2", "0,0,1,1,2", "none", "chain:1")]


def request(index: int, name: str, *, sampled: bool) -> Submit:
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(1, VOCABULARY, (1 + 11 * index % 40,), generator=generator).tolist()
    sampling = Sampling(
        max_tokens=TOKENS,
        seed=900 + index,
        temperature=(1.0, 0.7, 1.3)[index % 3] if sampled else 0.0,
        grammar=GRAMMARS[name],
        **FIELDS[index % len(FIELDS)],
    )
    return Submit(request_id=f"{index}", prompt=tuple(prompt), sampling=sampling, task=f"t{index % len(SHAPES)}")


def requests(first: int = 0, rounds: int = 2) -> list[Submit]:
    """Return requests with every grammar, greedy and sampled, in mixed shapes, and some without a grammar."""
    names = list(GRAMMARS) * rounds
    return [request(first + i, name, sampled=bool(i // len(GRAMMARS) % 2)) for i, name in enumerate(names)]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json, VOCABULARY, (END,))


@pytest.fixture(scope="module")
def plain(pair: Any) -> GuidedDecoding:
    return GuidedDecoding(pair.target)


@pytest.fixture
def guided_engine(make_engine: Any, lossless: Any, compiler: GrammarCompiler) -> Any:
    """Return a function that builds an engine with grammars and a plan of mixed shapes."""
    plan_of, *_ = lossless

    def make(draft: Any = "copy", **fields: Any) -> Any:
        engine = make_engine(draft, grammars=compiler, eos_token_ids=(END,), **{"max_num_seqs": 8, **fields})
        engine.set_plan(plan_of(SHAPES))
        return engine

    return make


def run(engine: Any, submits: Sequence[Submit], between: Any = None) -> dict[str, list[int]]:
    tokens_by_request: dict[str, list[int]] = {r.request_id: [] for r in submits}
    for submit in submits:
        engine.add(submit)
    steps = 0
    while not engine.idle:
        new: list[Tokens] = between(engine, steps) if between is not None else []
        for one in [*new, *engine.step()]:
            assert one.finish in (None, "stop", "length"), one.error
            tokens_by_request[one.request_id] += one.tokens
        steps += 1
    engine.check()
    return tokens_by_request


def texts(plain: GuidedDecoding, submits: Sequence[Submit]) -> dict[str, list[int]]:
    """Return the plain texts. The reference ends a text without grammar only at a stop token, the engine at END too."""
    return {r.request_id: _until_end(plain.text(r), r) for r in submits}


def _until_end(answer: list[int], request: Submit) -> list[int]:
    if request.sampling.grammar:
        return answer
    least = max(request.sampling.min_tokens - 1, 0)
    return answer[: answer.index(END, least) + 1] if END in answer[least:] else answer


@pytest.mark.parametrize("draft", [None, "copy", "eagle3", "eagle", "medusa", "draft-model", "ngram", "ngram-blind"])
def test_guided_text_equals_plain_decoding(guided_engine: Any, plain: GuidedDecoding, draft: str | None) -> None:
    submits = [r for r in requests() if r.sampling.grammar]
    assert run(guided_engine(draft), submits) == texts(plain, submits)
