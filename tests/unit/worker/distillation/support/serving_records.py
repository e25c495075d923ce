"""Records as a worker would capture them: made by the real engine, in this process."""

from __future__ import annotations

from pathlib import Path

from specdecode_worker.capture import Record, opening_of
from specdecode_worker.commands.common.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.engine.ipc.messages import Sampling
from specdecode_worker.models.checkpoints.weights import weights_hash

LAWS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 8},
    {"temperature": 0.7, "top_k": 20, "logit_bias": ((65, 2.0), (66, -5.0))},
)


def engine_of(model: Path, draft: Path) -> LocalEngine:
    return LocalEngine(
        WorkerConfig(
            model=ModelConfig(uri=f"file://{model}", served_name="m", dtype="float32"),
            draft=DraftConfig(method="eagle3", uri=f"file://{draft}", required=True),
            engine=EngineConfig(max_num_seqs=8, device="cpu", threads=1, kv_cache_tokens=4096),
        ),
        Path("/nowhere"),
    )


def records_of(model: Path, draft: Path, count: int) -> list[Record]:
    engine = engine_of(model, draft)
    engine.run_shape(TreeShape.chain(3))
    texts = [f"{'alpha' if i % 2 else 'beta'} says number {i * 7919 % 1000}" for i in range(count)]
    prompts = [engine.prompt({"messages": [{"role": "user", "content": text}]}) for text in texts]
    laws = [Sampling(max_tokens=24, seed=i, **LAWS[i % len(LAWS)]) for i in range(count)]
    answers, _ = engine.answer(prompts, laws)
    return [
        Record(
            tokens=(*prompts[i].tokens, *answers[i].tokens),
            prompt_length=len(prompts[i].tokens),
            sampling=laws[i],
            target=weights_hash(model),
            task="alpha" if i % 2 else "beta",
            time_seconds=1000.0 + i,
            opening=opening_of(texts[i]),
            share=0.5 if i % 2 else 1.0,
        )
        for i in range(count)
    ]
