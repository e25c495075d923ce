"""Runs of ``distill`` in the process of a test, the records that they read, and the documents of their Jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from specdecode_worker.__main__ import main
from specdecode_worker.capture import Record, opening_hash
from specdecode_worker.capture.records import encode
from specdecode_worker.capture.segments import Retention, SegmentWriter
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import (
    MAX_VERDICT_BYTES,
    DraftConfig,
    EngineConfig,
    Method,
    ModelConfig,
    TreeShape,
    WorkerConfig,
)
from specdecode_worker.contract.distillation import DistillationVerdict
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.sampling.params import Sampling

SAMPLING_PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 8},
    {"temperature": 0.7, "top_k": 20, "logit_bias": ((65, 2.0), (66, -5.0))},
)


def engine_of(model: Path, draft: Path, method: Method = "eagle3") -> LocalEngine:
    return LocalEngine(
        WorkerConfig(
            model=ModelConfig(uri=f"file://{model}", served_name="m", dtype="float32"),
            draft=DraftConfig(method=method, uri=f"file://{draft}", required=True),
            engine=EngineConfig(max_num_seqs=16, device="cpu", threads=1, kv_cache_tokens=4096),
        ),
        Path("/nowhere"),
    )


def records_of(model: Path, draft: Path, count: int) -> list[Record]:
    """Return ``count`` records of two tasks in alternation, cycling through ``SAMPLING_PARAMS``."""
    engine = engine_of(model, draft)
    engine.run_shape(TreeShape.chain(3))
    texts = [f"{'alpha' if i % 2 else 'beta'} says number {i * 7919 % 1000}" for i in range(count)]
    prompts = [engine.prompt({"messages": [{"role": "user", "content": text}]}) for text in texts]
    samplings = [Sampling(max_tokens=24, seed=i, **SAMPLING_PARAMS[i % len(SAMPLING_PARAMS)]) for i in range(count)]
    answers, _ = engine.answer(prompts, samplings)
    return [
        Record(
            tokens=(*prompts[i].tokens, *answers[i].tokens),
            prompt_length=len(prompts[i].tokens),
            sampling=samplings[i],
            target=model_hash(model),
            task="alpha" if i % 2 else "beta",
            time_seconds=1000.0 + i,
            opening=opening_hash(texts[i]),
            share=0.5 if i % 2 else 1.0,
        )
        for i in range(count)
    ]


def write(folder: Path, records: Sequence[Record]) -> Path:
    segments = SegmentWriter(folder, Retention(1e12, 2**24))
    for record in records:
        segments.append(encode(record))
    segments.close()
    return folder


def noise(records: Sequence[Record]) -> list[Record]:
    """Return the records with random tokens as answers."""
    generator = torch.Generator().manual_seed(0)

    def spoiled(record: Record) -> Record:
        out = torch.randint(0, 250, (record.output_length,), generator=generator).tolist()
        return msgspec.structs.replace(record, tokens=(*record.tokens[: record.prompt_length], *out))

    return [spoiled(record) for record in records]


def run(flags: list[str], out: Path, *more: str) -> int:
    return main(["distill", *flags, "--out", str(out), *more])


def run_job(message: Path, flags: list[str], out: Path, *more: str) -> DistillationVerdict:
    """Run a Job, which exits with 0 whatever comes of it, and return the document of its termination message."""
    assert run(flags, out, *more) == 0
    text = message.read_text()
    message.unlink()
    assert len(text.encode()) <= MAX_VERDICT_BYTES
    return DistillationVerdict.model_validate_json(text)
