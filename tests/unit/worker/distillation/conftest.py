"""Fixtures for the distillation tests: a small random Llama with a head, and records captured from the real engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdecode_worker.capture import Record
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.weights import load_causal_lm
from support import small_model
from support.worker.distillation_runs import records_of, write


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random target."""
    folder = tmp_path_factory.mktemp("model")
    small_model.write_target(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 0.1  # tied: at full size every token would predict itself
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a draft head for the small target."""
    folder = tmp_path_factory.mktemp("draft")
    small_model.write_draft(folder)
    return folder


@pytest.fixture(scope="session")
def target(model: Path) -> CausalLM:
    return load_causal_lm(model, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def records(model: Path, draft: Path) -> Sequence[Record]:
    """Return records of 90 conversations of two tasks, with several sets of sampling parameters."""
    return records_of(model, draft, 90)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Return a file of four golden prompts in one domain."""
    path = tmp_path / "golden.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"Golden number {i}"}], "domain": "g"} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the termination message."""
    path = tmp_path / "termination-log"
    monkeypatch.setenv("SPECDECODE_TERMINATION_LOG", str(path))
    return path


@pytest.fixture
def inputs(model: Path, draft: Path, golden: Path, records: Sequence[Record], tmp_path: Path) -> list[str]:
    """Return the flags that name models and records, and small sizes."""
    capture = write(tmp_path / "capture", records)
    words = ["--model", f"file://{model}", "--draft", f"file://{draft}", "--capture", str(capture)]
    words += ["--golden", str(golden), "--dtype", "float32", "--round-steps", "2", "--patience", "9"]
    return [*words, "--batch-tokens", "256", "--max-tokens", "12"]


@pytest.fixture
def flags(inputs: list[str]) -> list[str]:
    """Return the flags of a short run as a Job."""
    return [*inputs, "--job", "--steps", "4", "--replay-share", "0", "--threads", "1"]
