"""Speculative text equals plain text for answers that follow a grammar, whatever drafts them.

The answers end by themselves or at ``max_tokens``; either way they follow the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from msgspec import structs

from specdecode_worker.contract import MergedDraft, TaskMatch, TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.core.request import Row
from specdecode_worker.engine import engine as step_launcher
from specdecode_worker.engine.stats import RowResult, StepRecorder
from specdecode_worker.guided import grammars
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.guided.guide import Guide
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.sampling.sampler import TokenMasks
from support.char_tokenizer import END, tokenizer_json
from support.lossless.plain_decoding import GuidedDecoding
from support.lossless.small_requests import DRAFTS, plan_of
from support.small_llama import texts

TOKENS, VOCABULARY = 40, 61
SCHEMA = {
    "type": "object",
    "properties": {"name_of_it": {"enum": ["abc", "abd"]}, "id": {"enum": [0, 12, 345]}, "tr": {"type": "boolean"}},
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
def guided_engine(make_engine: Any, compiler: GrammarCompiler) -> Any:
    """Return a function that builds an engine with grammars and a plan of mixed shapes."""
    return partial(make_engine, grammars=compiler, eos_token_ids=(END,), plan=plan_of(SHAPES))


@pytest.mark.core
@pytest.mark.parametrize("draft", [None, "copy", *DRAFTS])
def test_guided_text_equals_plain_decoding(guided_engine: Any, plain: GuidedDecoding, draft: str | None) -> None:
    submits = [r for r in requests() if r.sampling.grammar]
    assert texts(guided_engine(draft), submits) == plain.texts(submits)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pipelined": True},
        {"blocks": 10, "budget": 24, "max_num_seqs": 5},
        {"blocks": 10, "budget": 24, "max_num_seqs": 5, "pipelined": True},
        {"graphs": (1, 2, 4, 8)},
        {"prefix_caching": False, "budget": 16, "chunked": True},
    ],
    ids=["in-turn", "pipelined", "preempted", "preempted-pipelined", "graphs", "small-chunks"],
)
def test_mixed_batches_equal_plain_decoding(guided_engine: Any, plain: GuidedDecoding, fields: dict[str, Any]) -> None:
    submits = requests(rounds=4)
    engine = guided_engine("copy", **fields)
    assert texts(engine, submits) == plain.texts(submits)
    assert engine.report().preemptions > 0 or "blocks" not in fields, "the test must make the blocks run out"
    if "graphs" in fields:
        assert set(engine._graphs.eager) == {"prefill"}
        assert engine._graphs.outside["grammar"] > 10


@pytest.mark.parametrize("pipelined", [False, True], ids=["direct", "pipelined"])
@pytest.mark.parametrize("shape", ["chain:3", "tree:3,2,1"])
def test_guided_rows_leave_the_drafts_of_others_in_graphs(
    guided_engine: Any, plain: GuidedDecoding, monkeypatch: pytest.MonkeyPatch, shape: str, pipelined: bool
) -> None:
    """Only rows with a grammar are ever drafted call by call, and only where no other row drafts in the same step."""
    submits = [request(i, name, sampled=i % 2 == 0) for i, name in enumerate(("none", "schema", "regex", "none") * 3)]
    plan = plan_of([TreeShape.parse(shape)] * len(SHAPES))
    engine = guided_engine("eagle3", graphs=(1, 2, 4, 8), pipelined=pipelined, plan=plan)
    one_by_one: list[bool] = []
    forced: list[int] = []
    propose, record_row = step_launcher.StepLauncher._propose, StepRecorder.record_row

    def noting(self: Any, rows: tuple[Row, ...]) -> Any:
        one_by_one.extend(row.request.guide is None for row in rows if row.tree.drafted_depth)
        return propose(self, rows)

    def checked(self: Any, row: Row, result: RowResult, *rest: Any) -> None:
        if row.tree.given:
            assert len(result.tokens) == row.tree.verified, "a forced token is lost"
            forced.append(len(result.tokens))
        record_row(self, row, result, *rest)

    monkeypatch.setattr(step_launcher.StepLauncher, "_propose", noting)
    monkeypatch.setattr(StepRecorder, "record_row", checked)
    assert texts(engine, submits) == plain.texts(submits)
    made = engine._graphs
    assert not any(one_by_one), "a row without a grammar was drafted before the graph"
    assert set(made.eager) == {"prefill"}
    assert set(made.outside) <= {"grammar", "catch-up"}
    drafts = [graph.replays for key, graph in made._graphs.items() if key.only_drafts]
    assert sum(drafts) > 10
    assert sum(forced) > 20
    assert engine.report().accepted_tokens > 0


def test_drafts_beside_others_are_masked_at_their_roots(guided_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the masks of the roots the texts are the same and fewer drafted tokens are accepted."""
    submits = [request(i, "none" if i % 4 == 0 else "regex", sampled=False) for i in range(8)]
    accepted = []
    of_roots = TokenMasks.of_roots

    def nothing(self: TokenMasks) -> Any:
        masks = of_roots(self)
        return replace(masks, rows=[0] * len(masks.rows))

    for masked in (True, False):
        if not masked:
            monkeypatch.setattr(TokenMasks, "of_roots", nothing)
        engine = guided_engine(graphs=(8,))
        engine.set_plan(plan_of([TreeShape.chain(2)] * len(SHAPES), version=2))
        found = texts(engine, submits)
        accepted.append((found, engine.report().accepted_tokens))
    assert accepted[0][0] == accepted[1][0]
    assert accepted[0][1] > accepted[1][1]


@pytest.mark.parametrize("draft", [None, "eagle3", "medusa", "peagle", "ngram-blind"])
def test_graphs_of_other_drafts(guided_engine: Any, plain: GuidedDecoding, draft: str | None) -> None:
    engine = guided_engine(draft, graphs=(2, 8), pipelined=True)
    assert texts(engine, requests()) == plain.texts(requests())
    assert set(engine._graphs.eager) == {"prefill"}


@pytest.mark.parametrize("graphs", [(), (1, 2, 4, 8)], ids=["eager", "graphs"])
def test_prefix_reuse_and_two_drafts(guided_engine: Any, plain: GuidedDecoding, graphs: tuple[int, ...]) -> None:
    """Tasks run one of two drafts, or merge both."""
    merged = (MergedDraft(draft="d1", depth=6),)
    tasks = tuple(
        TaskMatch(name=f"t{i}", draft="d1" if i % 3 == 0 else None, merge=merged if i % 3 == 1 else ())
        for i in range(len(SHAPES))
    )
    engine = guided_engine(["copy", "ngram"], graphs=graphs, plan=plan_of(SHAPES, tasks=tasks))
    for _ in range(2):
        assert texts(engine, requests()) == plain.texts(requests())
    report = engine.report()
    assert report.prefix_hit_tokens > 0, "the second time must reuse prompts"
    assert report.credit, "merged drafts are credited"


def test_multi_round_sampling_follows_grammars(guided_engine: Any, plain: GuidedDecoding) -> None:
    """Greedy answers are those of plain decoding. Sampled ones are others, and follow their grammars."""
    submits = [r for r in requests(rounds=4) if r.sampling.grammar]
    answers = texts(guided_engine("copy", coupled=False), submits)
    for submit in submits:
        answer = answers[submit.request_id]
        if submit.sampling.temperature == 0:
            assert answer == plain.text(submit)
        for end in range(len(answer)):
            assert plain.allowed(submit, answer[:end])[answer[end]], (submit.request_id, end)


@pytest.mark.parametrize("done", [1, 3, 7])
def test_continued_requests(guided_engine: Any, plain: GuidedDecoding, done: int) -> None:
    """A request that continues the output of another worker follows its grammar from there."""
    submits = [r for r in requests(rounds=2) if r.sampling.grammar and len(plain.text(r)) > done]
    continued = [structs.replace(r, emitted=tuple(plain.text(r)[:done])) for r in submits]
    rest = texts(guided_engine(), continued)
    assert rest == {r.request_id: plain.text(r)[done:] for r in submits}


def steps_of(engine: Any, submits: Sequence[Submit]) -> tuple[int, dict[str, list[int]]]:
    """Run the requests, and return the number of steps and the texts."""
    counted: list[int] = []
    engine.on_launch = lambda rows, tokens: counted.append(rows)
    answers = texts(engine, submits)
    return len(counted), answers


def test_forced_tokens_are_drafted_without_a_draft(guided_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = request(0, "compact", sampled=False)
    engine = guided_engine(None)
    fast, answers = steps_of(engine, [submit])
    report = engine.report()
    assert (report.drafts, report.draft_tokens, report.accepted_tokens) == (0, 0, 0), "they do not count as drafts"
    monkeypatch.setattr(Guide, "forced", lambda self: ())
    slow, wanted = steps_of(guided_engine(None), [submit])
    assert answers == wanted
    (answer,) = answers.values()
    assert answer[-1] == END
    assert slow == len(answer) > 2 * fast


@pytest.mark.parametrize("graphs", [(), (8,)], ids=["direct", "graphs"])
def test_wrong_forced_tokens_are_rejected(
    guided_engine: Any, plain: GuidedDecoding, graphs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text stays the same; only more steps are taken."""
    submits = [r for r in requests() if r.sampling.grammar]
    right, _ = steps_of(guided_engine(graphs=graphs), submits)
    monkeypatch.setattr(step_launcher, "given_tokens", lambda request, tree: ())
    wrong, answers = steps_of(guided_engine(graphs=graphs), submits)
    assert answers == plain.texts(submits)
    assert wrong > right or not graphs
