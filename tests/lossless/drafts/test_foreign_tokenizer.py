"""The embedded model drafted by a part of itself with another tokenizer: the text is the same, and so is acceptance.

Texts are compared in fp32, where a tree may round differently from plain steps (see test_embedded). These answers have
no near tie.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.__main__ import main
from specdecode_worker.commands.flags import EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import Answer, LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.drafts.draft_files import draft_hash
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.sampling.params import Sampling
from support.lossless.permuted_draft import write_permuted_draft

PROMPTS = Path(__file__).parents[3] / "benchmarks" / "prompts" / "heldout.jsonl"
COUNT, TOKENS = 8, 16
LEFT_OUT = range(20, 23)
"""Layers of the target that the draft lacks, so that not all of its proposals are right."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a draft with the target's tokenizer, one with permuted ids, and one with another vocabulary as well."""
    base, origin = tmp_path_factory.mktemp("drafts"), resolve(EMBEDDED_TARGET, default_cache_dir())
    made = {
        "same": {"seed": None},
        "permuted": {"seed": 1},
        "foreign": {"seed": 2, "foreign": 500, "lacks": lambda i, token: i > 1000 and i % 5 == 0},
        "bytes": {"seed": 3, "lacks": lambda i, token: len(token) > 1},
    }
    return {
        name: write_permuted_draft(base / name, origin, layers=LEFT_OUT, **how)  # type: ignore[arg-type]
        for name, how in made.items()
    }


def config_of(draft: Path | None) -> WorkerConfig:
    method = "none" if draft is None else "draft-model"
    uri = None if draft is None else f"file://{draft}"
    return WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype="float32", max_model_len=512),
        draft=DraftConfig.model_validate({"method": method, "uri": uri, "required": draft is not None}),
        engine=EngineConfig(
            max_num_seqs=COUNT, device="cpu", threads=torch.get_num_threads(), kv_cache_tokens=COUNT * 256
        ),
    )


def answers(draft: Path | None, shape: str) -> tuple[LocalEngine, list[Answer]]:
    """Return the answers to prompts of every kind, every other one sampled at 0.8."""
    local = LocalEngine(config_of(draft), default_cache_dir())
    local.run_shape(TreeShape.parse(shape))
    lines = [json.loads(text) for text in PROMPTS.read_text().splitlines()]
    prompts = [local.prompt(lines[13 * i % len(lines)]) for i in range(COUNT)]
    how = [Sampling(max_tokens=TOKENS, temperature=0.8 * (i % 2), seed=i) for i in range(COUNT)]
    return local, local.answer(prompts, how)[0]


@pytest.mark.embedded
@pytest.mark.timeout(1800)
def test_acceptance_and_text_with_another_tokenizer(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, plain = answers(None, "none")
    texts = [answer.tokens for answer in plain]
    tallies, states = {}, {}
    for name in ("same", "permuted", "foreign"):
        local, outputs = answers(folders[name], "tree:2,1,1")
        assert [answer.tokens for answer in outputs] == texts, name
        tallies[name] = [(answer.drafts, answer.accepted) for answer in outputs]
        states[name] = local.engine.report().draft
        local.close()
    assert tallies["permuted"] == tallies["same"], "full coverage: the same proposals under other ids"
    drafts, accepted = (sum(values) for values in zip(*tallies["foreign"], strict=True))
    assert 1 + accepted / drafts > 1.3
    assert [state.method for state in states.values()] == ["draft-model"] * 3
    hashes = {name: draft_hash(config_of(folder).draft, lambda uri: Path(uri[7:])) for name, folder in folders.items()}
    assert {name: state.hash for name, state in states.items()} == {name: hashes[name] for name in states}
    covered = [record.getMessage() for record in caplog.records if "another tokenizer" in record.getMessage()]
    assert ["cover 100 %" in message for message in covered] == [True, False]


@pytest.mark.embedded
@pytest.mark.timeout(1800)
def test_check_sizes_a_foreign_draft_and_refuses_one_of_bytes(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["check", "--model", EMBEDDED_TARGET, "--method", "draft-model", "--memory", "8", "--device", "cpu"]
    assert main([*flags, "--draft", f"file://{folders['foreign']}"]) == 0
    assert "fits: " in capsys.readouterr().out
    assert main([*flags, "--draft", f"file://{folders['bytes']}"]) == 1
    assert "of the tokens that the target makes of a sample text, and 50% are needed" in capsys.readouterr().out


# Draft models whose vocabulary is not the target's: acceptance where it can be compared, and what is never
# proposed.


SHAPES = [TreeShape.parse(text) for text in ("chain:4", "tree:3,2,1,1", "none", "chain:1")]


@pytest.mark.parametrize("fields", [{}, {"coupled": False}], ids=["coupled", "mss"])
def test_a_permuted_draft_is_accepted_as_often(make_engine: Any, lossless: Any, fields: dict[str, Any]) -> None:
    """A draft with the target's tokens under other ids proposes the same tokens as one with the same ids."""
    plan_of, submit, texts = lossless
    outcomes = []
    for draft in ("draft-model", "permuted-model"):
        engine = make_engine(draft, **fields)
        engine.set_plan(plan_of(SHAPES))
        requests = [submit(i, sampled=i % 2 == 0, tokens=40, shapes=len(SHAPES)) for i in range(12)]
        emitted = texts(engine, requests)
        cells = [(cell.task, cell.depth, cell.ranks) for cell in engine.report().acceptance]
        outcomes.append((emitted, sorted(cells)))
    assert outcomes[0] == outcomes[1]


def test_unknown_tokens_are_never_proposed(make_engine: Any, lossless: Any, pair: Any) -> None:
    plan_of, submit, texts = lossless
    engine = make_engine("foreign-model")
    engine.set_plan(plan_of([TreeShape.parse("tree:8,2")]))
    drafts, proposed = engine._drafts.proposals, set[int]()
    propose = drafts.propose

    def recorded(*args: Any) -> Any:
        result = propose(*args)
        if result.ranked_BNK is not None:
            proposed.update(result.ranked_BNK[result.ranked_BNK >= 0].tolist())
        return result

    drafts.propose = recorded
    requests = [submit(i, sampled=i % 2 == 0, tokens=40) for i in range(8)]
    emitted = {token for text in texts(engine, requests).values() for token in text}
    known = set(pair.foreign.vocabulary.target_ids.tolist())
    assert proposed <= known
    assert len(known) == 49
    assert len(proposed) > 40
    assert emitted - known, "the target emits tokens that the draft lacks"
