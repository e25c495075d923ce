"""The measurement of host time runs, and its steps are those that it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[3] / "benchmarks" / "host_cost.py"


@pytest.fixture
def host_cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("host_cost", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "host_cost", module)
    spec.loader.exec_module(module)
    for name, value in {"PROMPT_TOKENS": 20, "WARM_STEPS": 4, "STEPS": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize(("shape", "tokens"), [("none", 1), ("chain:3", 4)])
def test_every_step_emits_all_tokens_of_its_trees(host_cost: Any, shape: str, tokens: int) -> None:
    engine = host_cost.running(shape, 2)
    for _ in range(3):
        assert [len(new.tokens) for new in engine.step()] == [tokens, tokens]
    assert host_cost.measure(shape, 2) > 0
