"""Tests of the engine in the process of a command, without loading a model."""

from __future__ import annotations

import json
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.commands.comparison import _run_domain
from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt
from specdecode_worker.contract import TreeShape
from support.worker.small_engine import small_engine


class SmallLocalEngine(LocalEngine):
    """Two requests at once, over a small random Llama."""

    def __init__(self) -> None:
        self.engine = small_engine(max_num_seqs=2)
        self._plans = self._runs = 0


def test_eval_times_all_full_batches() -> None:
    """Five prompts are two batches of two, and one prompt that is answered and not timed."""
    prompts = [TokenizedPrompt((1, 2, 3 + index)) for index in range(5)]
    run = _run_domain(SmallLocalEngine(), prompts, TreeShape.chain(3), 0.0, Namespace(max_tokens=8, concurrency=2))
    assert [len(answer.tokens) for answer in run.plain] == [8] * 5
    assert [answer.tokens for answer in run.drafted] == [answer.tokens for answer in run.plain]
    assert (run.plain_timing.tokens, run.plain_timing.steps) == (4 * 7, 2 * 7), "their first tokens come from prefill"
    assert run.drafted_timing.tokens == 4 * 7
    assert run.drafted_timing.steps < 2 * 7


def test_a_prompt_may_contain_line_separators_of_unicode(tmp_path: Path) -> None:
    class Letters(SmallLocalEngine):
        def prompt(self, line: dict[str, Any]) -> TokenizedPrompt:
            return TokenizedPrompt(tuple(map(ord, line["prompt"])))

    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", "utf-8")
    assert Letters().prompts(path) == [TokenizedPrompt((97, 0x2028, 98, 0x85, 99))]


def test_a_closed_engine_leaves_its_memory_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval --against` loads another target on the same GPU, where memory that torch keeps is not free."""
    local = SmallLocalEngine()
    engine = weakref.ref(local.engine)
    gone: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(engine() is None))
    local.close()
    assert gone == [True]
