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
    small = {"PROMPT_TOKENS": 20, "WARM_STEPS": 4, "STEPS": 4, "POOL_BLOCKS": 2000, "OWNERS": 4, "TURNOVERS": 2}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize(("shape", "tokens"), [("none", 1), ("chain:3", 4)])
def test_every_step_emits_all_tokens_of_its_trees(host_cost: Any, shape: str, tokens: int) -> None:
    engine = host_cost.running(shape, 2)
    for _ in range(3):
        assert [len(new.tokens) for new in engine.step()] == [tokens, tokens]
    assert host_cost.measure(shape, 2) > 0


def test_the_blocks_of_a_chunk_come_from_a_warm_cache(host_cost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdecode_worker.core.kv_cache import BlockPool

    evicted: list[int] = []
    evict = BlockPool.evict
    monkeypatch.setattr(BlockPool, "evict", lambda self, block: (evicted.append(block), evict(self, block)))
    assert host_cost.measure_allocation() > 0
    chunk = host_cost.CHUNK_TOKENS // 16
    assert len(evicted) > host_cost.POOL_BLOCKS - (host_cost.OWNERS + 2) * chunk, "the second turn evicts"
