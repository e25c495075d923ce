"""A target that is quantized and split over two ranks emits the same text with speculation as without."""

from __future__ import annotations

from pathlib import Path

from specdecode_worker.contract import ModelConfig
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import load_engine
from support.worker.small_engine import drain, plan_of, submit, texts
from support.worker.small_folders import exact_config_of, write_head, write_target


def run(engine: Engine, shape: str, version: int) -> dict[str, list[int]]:
    engine.set_plan(plan_of(shape, draft=engine.report().draft.hash, version=version))
    for index in range(4):
        prompt = tuple((7 * index + 3 * position) % 97 for position in range(3 + 9 * index))
        engine.add(submit(str(index), prompt, seed=index))
    return texts(drain(engine))


def test_quantised_ranks_speculate_without_changing_the_text(tmp_path: Path) -> None:
    config = exact_config_of(write_target(tmp_path / "target"), write_head(tmp_path / "head"), 2)
    model = ModelConfig.model_construct(**dict(config.model) | {"quantization": "int8"})
    engine = load_engine(config.model_copy(update={"model": model}), Path)
    try:
        expected = run(engine, "none", 1)
        assert run(engine, "tree:3,2,1", 2) == expected
        assert engine.report().accepted_tokens
        assert all(len(tokens) == 20 for tokens in expected.values())
    finally:
        engine.close()
