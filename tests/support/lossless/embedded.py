"""Engines of the embedded model in this process, and the held-out prompts that they are asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, WorkerConfig
from specdecode_worker.models.fetch import default_cache_dir

EAGLE3 = DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True)
PROMPTS = Path(__file__).parents[3] / "benchmarks" / "prompts" / "heldout.jsonl"


def embedded_engine(
    *,
    target: str = EMBEDDED_TARGET,
    draft: DraftConfig = EAGLE3,
    dtype: Any = "float32",
    max_model_len: int = 512,
    **engine: Any,
) -> LocalEngine:
    """Return an engine on the CPU; ``engine`` are fields of EngineConfig."""
    config = WorkerConfig(
        model=ModelConfig(uri=target, served_name="embedded", dtype=dtype, max_model_len=max_model_len),
        draft=draft,
        engine=EngineConfig(device="cpu", **engine),
    )
    return LocalEngine(config, default_cache_dir())


def heldout_prompts() -> list[dict[str, Any]]:
    return [json.loads(text) for text in PROMPTS.read_text().splitlines()]
