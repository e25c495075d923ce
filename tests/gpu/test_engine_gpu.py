"""The engine on a GPU: text equals plain decoding with and without graphs, and a replayed step never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdecode_kernels import dispatch
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.engine import engine as step_launcher
from specdecode_worker.engine.calibration import calibrate, warm_up
from specdecode_worker.engine.cuda_graphs import CaptureFailed, CudaGraphBackend
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import load_engine
from support.small_llama import Networks, engine_of, networks, plan_of, submit, texts

SHAPE = {
    "vocab_size": 1031,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = {
    "vocab_size": 2304,
    "hidden_size": 2048,
    "intermediate_size": 2304,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
ROOT = Path(__file__).parents[2]
SHAPES = ("none", "chain:4", "tree:3,2,1")
SAMPLED = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])


@lru_cache(maxsize=1)
def pair(dtype: torch.dtype) -> Networks:
    return networks(dtype, "cuda", **SHAPE)


def engine(dtype: torch.dtype, shape: str, *, graphs: bool, rows: tuple[int, ...] = (1, 2, 4, 8)) -> Engine:
    made = engine_of(
        pair(dtype),
        max_num_seqs=8,
        blocks=200,
        budget=512,
        pipelined=True,
        backend=CudaGraphBackend() if graphs else None,
        rows=rows,
    )
    made.set_plan(plan_of(shape))
    return made


def requests(count: int, *, sampled: bool, **changed: Any) -> list[Any]:
    wanted = {"vocabulary": 1031, **changed}
    return [submit(i, sampled=sampled, **{"tokens": 20 + 5 * i, **wanted}) for i in range(count)]


@contextmanager
def device_waits_forbidden(made: Engine) -> Iterator[None]:
    """Raise on any wait for the device while row parameters are sent and a step is queued as a graph."""

    def forbidding_waits(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return right(*args, **named)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made._graphs, "plan", forbidding_waits(made._graphs.plan))  # type: ignore[union-attr]
        patch.setattr(made._graphs, "replay", forbidding_waits(made._graphs.replay))  # type: ignore[union-attr]
        patch.setattr(step_launcher, "upload_rows", forbidding_waits(step_launcher.upload_rows))  # type: ignore[attr-defined]
        yield


@SAMPLED
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_text_equals_plain_decoding(shape: str, sampled: bool) -> None:
    """The batch shrinks from eight rows to one, through all buckets."""
    asked = requests(8, sampled=sampled)
    plain = texts(engine(torch.float32, "none", graphs=False), asked)
    eager = engine(torch.float32, shape, graphs=False)
    assert texts(eager, asked) == plain
    replayed = engine(torch.float32, shape, graphs=True)
    assert texts(replayed, asked) == plain
    assert replayed._graphs.replayed > 10
    assert set(replayed._graphs.eager) <= {"prefill", "mixed"}
    one, two = eager.report(), replayed.report()
    assert (one.drafts, one.accepted_tokens) == (two.drafts, two.accepted_tokens)
    assert shape == "none" or two.accepted_tokens > two.drafts / 4  # as on a CPU: 80 of 215 and more
    with device_waits_forbidden(replayed):  # all graphs have been captured
        assert texts(replayed, asked) == plain


@SAMPLED
def test_bf16_plain_text_equals_the_engine_without_graphs(sampled: bool) -> None:
    """Batch and graph have equally many rows: with matrices of other sizes, sums are rounded in another order."""
    asked = requests(4, sampled=sampled, tokens=40)
    replayed = engine(torch.bfloat16, "none", graphs=True, rows=(4,))
    assert texts(replayed, asked) == texts(engine(torch.bfloat16, "none", graphs=False), asked)
    assert replayed._graphs.replayed > 30


@SAMPLED
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_bf16_drafts_are_accepted_as_often_as_without_graphs(shape: str, sampled: bool) -> None:
    asked = requests(8, sampled=sampled, tokens=60)
    rates = []
    for graphs in (False, True):
        made = engine(torch.bfloat16, shape, graphs=graphs)
        assert {len(text) for text in texts(made, asked).values()} == {60}
        report = made.report()
        rates.append(report.accepted_tokens / report.drafts)
    assert rates[1] == pytest.approx(rates[0], rel=0.15)


def test_a_step_that_cannot_be_captured_leaves_the_backend_usable() -> None:
    backend, x = CudaGraphBackend(), torch.ones(4, device="cuda")

    def multiply(x: torch.Tensor) -> None:
        x.mul_(1)

    def add(x: torch.Tensor) -> None:
        x.add_(2)

    def waits() -> None:
        x.add_(1)
        torch.cuda.synchronize()  # forbidden while a stream is captured

    def too_large() -> None:
        torch.empty(2**45, dtype=torch.uint8, device="cuda")

    replayed = backend.capture(lambda: multiply(x)).replay
    for work in (waits, too_large):
        with pytest.raises(CaptureFailed):
            backend.capture(work)
    x.zero_()
    captured = backend.capture(lambda: add(x))
    x.zero_()
    captured.replay()
    replayed()
    assert x.tolist() == [2.0] * 4
    torch.cuda.empty_cache()
    assert torch.ones(2**20, device="cuda").sum().item() == 2**20


def test_a_recording_that_breaks_off_holds_no_memory_once_the_graphs_are_cleared() -> None:
    """A rank of several clears its graphs then, and runs eagerly: cached memory must serve tensors of other sizes."""
    backend = CudaGraphBackend()
    with pytest.raises(RuntimeError):
        backend.record(torch.cuda.synchronize)  # forbidden while a stream is captured
    backend.clear()
    free = torch.cuda.mem_get_info()[0]
    for share in (0.5, 0.7):  # the second takes the memory of the first, which torch has cached
        torch.empty(int(share * free), dtype=torch.uint8, device="cuda")


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the shapes of a small Llama and its EAGLE-3 head for the modules of benchmarks/gpu."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    from shapes import Shapes

    head = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 2304}
    return Shapes("small", {**LLAMA, "architectures": ["LlamaForCausalLM"]}, head, 0.0, 1.0)


def test_an_eagle3_head_drafts_as_the_references_do(small_shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that the product of few rows serves, heads of 128 numbers in groups of 4, and a real EAGLE-3 head.

    The weights are random and the temperature is 1: the noise, which target and draft share, decides most tokens, so
    that many drafts are accepted.
    """
    from harness import Asked, build

    results: dict[tuple[bool, str], Any] = {}
    for on_kernels in (True, False):
        if not on_kernels:
            monkeypatch.setattr(dispatch, "on_gpu", lambda x: False)
        asked = Asked(
            shapes=small_shapes, batches=(4,), context=64, dtype=torch.float32, device=torch.device("cuda"),
            always_right=False, filled=False, eager=not on_kernels,
        )  # fmt: skip
        bench = build(asked)
        for shape in SHAPES:
            bench.run_shape(TreeShape.parse(shape))
            before = bench.engine.report()
            text = texts(
                bench.engine, requests(4, sampled=True, vocabulary=2304, tokens=48, temperature=1.0, top_p=1.0, top_k=0)
            )
            after = bench.engine.report()
            counts = after.drafts - before.drafts, after.accepted_tokens - before.accepted_tokens
            results[on_kernels, shape] = text, counts
    for shape in SHAPES:
        assert results[True, shape] == results[False, shape]
        assert results[True, shape][0] == results[False, "none"][0]
    assert results[True, "chain:4"][1][1] > 10


def test_a_worker_starts_from_files_and_times_its_steps_first(small_shapes: Any, tmp_path: Path) -> None:
    """With the memory that the card has left, and steps that are launched ahead when the last one is timed."""
    from networks import random_target, write_config, write_head

    target = random_target(small_shapes, torch.bfloat16, torch.device("cuda"))
    write_config(small_shapes, tmp_path / "target")
    weights = {name: value.cpu() for name, value in target.state_dict().items()}
    save_file(weights, tmp_path / "target" / "model.safetensors")
    write_head(small_shapes, target, tmp_path / "head", torch.bfloat16, torch.device("cuda"))
    config = WorkerConfig(
        model=ModelConfig(uri=f"file://{tmp_path}/target", served_name="small", dtype="bfloat16"),
        draft=DraftConfig(method="eagle3", uri=f"file://{tmp_path}/head", required=True),
        engine=EngineConfig(device="cuda", max_num_seqs=4, kv_cache_tokens=8192),
    )
    made = load_engine(config, lambda uri: Path(uri.removeprefix("file://")))
    made.set_plan(plan_of("chain:4").model_copy(update={"guard": True}))
    warm_up(made)
    assert list(calibrate(made, 20)) == [1, 2, 4]
    asked = requests(4, sampled=True, vocabulary=2304, tokens=48)
    assert all(texts(made, asked).values())
    assert made.report().drafts > 0
    assert made.load_draft is not None
    made.set_draft("", made.load_draft(config.draft))  # its graphs are captured once more
    assert all(texts(made, asked).values())
