"""Tests of the engine in the process of a command, without loading a model."""

from __future__ import annotations

import weakref
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from specdecode_worker.__main__ import main
from specdecode_worker.commands.comparison import _run_domain
from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt
from specdecode_worker.contract import TreeShape
from specdecode_worker.training.errors import PromptFileError
from support.training_fixtures import Letters
from support.worker.small_engine import small_engine


class SmallLocalEngine(LocalEngine):
    """Two requests at once, over a small random Llama."""

    def __init__(self) -> None:
        self.engine = small_engine(max_num_seqs=2)
        self._plans = self._runs = 0


class LetterTokenizer(Letters):
    """The chat of letters with the names of a worker's tokenizer."""

    chat = Letters.ask


def test_eval_times_all_full_batches() -> None:
    """Five prompts are two batches of two, and one prompt that is answered and not timed."""
    prompts = [TokenizedPrompt((1, 2, 3 + index)) for index in range(5)]
    run = _run_domain(SmallLocalEngine(), prompts, TreeShape.chain(3), 0.0, Namespace(max_tokens=8, concurrency=2))
    assert [len(answer.tokens) for answer in run.plain] == [8] * 5
    assert [answer.tokens for answer in run.drafted] == [answer.tokens for answer in run.plain]
    assert (run.plain_timing.tokens, run.plain_timing.steps) == (4 * 7, 2 * 7), "their first tokens come from prefill"
    assert run.drafted_timing.tokens == 4 * 7
    assert run.drafted_timing.steps < 2 * 7


def test_prompts_of_a_file_keep_their_domain(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "ab", "domain": "code"}\n\n{"messages": [{"role": "user", "content": "cd"}]}\n')
    local = SmallLocalEngine()
    local.tokenizer = LetterTokenizer()  # type: ignore[assignment]
    assert local.prompts(path) == [TokenizedPrompt((97, 98), "code"), TokenizedPrompt((99, 100), "other")]


@pytest.mark.parametrize(("text", "named"), [("", "holds no prompts"), ('{"prompt": "a"}\n[]', "line 2")])
def test_a_file_without_usable_prompts_is_refused(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=named):
        SmallLocalEngine().prompts(path)


@pytest.mark.parametrize(("command", "function"), [("eval", "evaluate_on_engine"), ("bench", "local_engine")])
def test_commands_end_with_the_reason_why_prompts_are_refused(
    command: str, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PromptFileError("prompts.jsonl, line 2: no JSON")

    monkeypatch.setattr(f"specdecode_worker.commands.{command}.{function}", refuse)
    assert main([command, "--prompts", "prompts.jsonl"]) == 1
    assert "prompts.jsonl, line 2" in capsys.readouterr().err


def test_a_closed_engine_leaves_its_memory_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval --against` loads another target on the same GPU, where memory that torch keeps is not free."""
    local = SmallLocalEngine()
    engine = weakref.ref(local.engine)
    gone: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(engine() is None))
    local.close()
    assert gone == [True]
