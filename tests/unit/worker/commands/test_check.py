"""Tests of the command ``check``: its output, its exit codes, and that it reads only checkpoint headers.

The engine in the process of a command is tested without loading a model.
"""

from __future__ import annotations

import json
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdecode_worker.__main__ import main
from specdecode_worker.commands.comparison import _run_domain
from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt
from specdecode_worker.contract import CheckVerdict, TreeShape
from specdecode_worker.training.errors import PromptFileError
from support.training_fixtures import Letters
from support.worker.quantized_folders import LARGE, write_sparse
from support.worker.small_engine import small_engine
from support.worker.small_folders import config_of, write_head, write_target, write_tokenizer

FITS = """\
memory                                                               2.00 GiB
- reserve of 20%                                                    -0.40 GiB
- Python and torch                                                  -0.38 GiB
- weights of the target                                             -0.00 GiB
- weights of the draft                                              -0.00 GiB
- tables and state of 16 sequences                                  -0.00 GiB
- activations of a step of 512 tokens                               -0.00 GiB
= for keys and values                                                1.22 GiB
/ bytes per block of 16 tokens (target 384, draft 128 a token)        8,576 B
= tokens of keys and values that there is room for                2,443,264
  one sequence of 256 tokens needs                                      320

fits: 5,120 tokens of keys and values, 16 sequences of 256 tokens at once
warning: the draft's weights are 48% of the target's; beyond 30% a draft usually costs more than it brings
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    target, head = write_target(tmp_path / "t"), write_head(tmp_path / "h")
    return ["--model", f"file://{target}", "--draft", f"file://{head}", "--dtype", "float32", "--device", "cpu"]


def test_arithmetic_output_is_exact(folders: list[str], capsys: Any) -> None:
    assert main(["check", *folders, "--memory", "2"]) == 0
    output = capsys.readouterr().out
    assert output == FITS


def test_another_gpu_keeps_quantized_weights_packed(tmp_path: Path, capsys: Any) -> None:
    """Also on a machine without a GPU, whose CPU would dequantize them."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 16}
    write_sparse(tmp_path / "t", LARGE | shape, "awq")
    weights = []
    for device in ("cuda", "cpu"):
        flags = ["--model", f"file://{tmp_path / 't'}", "--method", "none", "--memory", "80", "--device", device]
        assert main(["check", *flags, "--json"]) == 0
        lines = CheckVerdict.model_validate_json(capsys.readouterr().out).arithmetic
        weights += [float(line.split()[-2]) for line in lines if "weights of the target" in line]
    assert weights == [-0.62, -0.99]


def test_model_that_does_not_fit_returns_1_with_advice(folders: list[str], capsys: Any) -> None:
    assert main(["check", *folders, "--memory", "0.48", "--kv-cache-tokens", "1000000"]) == 1
    output = capsys.readouterr().out
    assert "does not fit: the memory of 0.48 GiB leaves" in output
    assert "\nfits:" not in output


def test_json_output_is_the_verdict(folders: list[str], capsys: Any) -> None:
    assert main(["check", *folders, "--json"]) == 0
    verdict = CheckVerdict.model_validate_json(capsys.readouterr().out)
    assert (verdict.serves, verdict.kv_tokens) == (True, 5120)
    assert main(["check", *folders, "--memory", "0.2", "--json"]) == 1
    assert not CheckVerdict.model_validate_json(capsys.readouterr().out).fits


def test_check_reads_no_weights(folders: list[str], tmp_path: Path, capsys: Any) -> None:
    """The data of every weight file is a hole of the same size, of which a reader would read only zeros."""
    for name in ("t", "h"):
        path = tmp_path / name / "model.safetensors"
        size, header = path.stat().st_size, path.read_bytes()
        end = 8 + int.from_bytes(header[:8], "little")
        path.write_bytes(header[:end])
        with path.open("r+b") as file:
            file.truncate(size)
    assert main(["check", *folders]) == 0
    assert "fits:" in capsys.readouterr().out


def test_a_draft_for_another_target_is_reported(folders: list[str], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "h" / "model.safetensors"
    tensors = load_file(path)
    del tensors["fc.weight"]
    save_file(tensors, path)
    assert main(["check", *folders]) == 1
    assert f"the draft cannot be used: {tmp_path / 'h'}: fc.weight is missing" in capsys.readouterr().out


def test_an_unreadable_target_is_reported(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text("{")
    assert main(["check", "--model", f"file://{tmp_path}", "--method", "none"]) == 1
    assert "is no JSON" in capsys.readouterr().err


def test_a_small_separate_draft_is_warned_about(tmp_path: Path, capsys: Any) -> None:
    target, draft = write_target(tmp_path / "t"), write_target(tmp_path / "d", num_hidden_layers=1)
    for folder in (target, draft):
        write_tokenizer(folder)
    flags = ["--model", f"file://{target}", "--draft", f"file://{draft}", "--method", "draft-model", "--memory", "2"]
    assert main(["check", *flags, "--device", "cpu"]) == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "of its own" in line]
    assert "0.0M parameters; below 50M" in warning
    assert "measure it with `specdecode-worker bench`" in warning


def test_invalid_flag_is_reported(folders: list[str], capsys: Any) -> None:
    assert main(["check", *folders, "--gpu-memory-utilization", "1.5"]) == 2
    assert "gpu_memory_utilization" in capsys.readouterr().err


def test_a_pod_needs_no_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    config = config_of(write_target(tmp_path / "t"), model={"uri": f"file://{tmp_path / 't'}"}, max_num_seqs=3)
    monkeypatch.setenv("SPECDECODE_CONFIG", config.model_dump_json())
    assert main(["check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == 3


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
    refuse = Mock(side_effect=PromptFileError("prompts.jsonl, line 2: no JSON"))
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
