"""Tensor parallelism over gloo: two ranks emit the tokens of one device, split its memory, and end together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from specdecode_worker.contract import ModelConfig, WorkerConfig
from specdecode_worker.core.errors import RankLost
from specdecode_worker.core.request import Request
from specdecode_worker.engine import tensor_parallel as rank_process
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import load_engine
from specdecode_worker.engine.tensor_parallel import Assignment, LeaderTarget, RankGroup
from specdecode_worker.models.errors import ConfigMismatch
from support.processes import spawned
from support.small_llama4 import save_llama4
from support.tiers import by_effort
from support.worker import graph_ranks
from support.worker.graph_ranks import PROMPTS, SAMPLING, accepted_siblings, serve
from support.worker.small_engine import drain, submit
from support.worker.small_folders import SHAPE, config_of, exact_config_of, write_head


@pytest.fixture(scope="module")
def split(folders: tuple[Path, Path]) -> Iterator[Engine]:
    engine = load_engine(exact_config_of(*folders, 2), Path)
    yield engine
    engine.close()


def numbers(nested: Any) -> list[float]:
    """Return all numbers of nested lists, in order."""
    return [x for each in nested for x in numbers(each)] if isinstance(nested, list | tuple) else [nested]


def test_blocks_of_all_ranks_move_whole(split: Engine, whole: Engine) -> None:
    """The prefix of one prompt is exported, erased and imported on two ranks, and continues as on one device."""
    expected = serve(whole, "chain:3")["7"]
    serve(split, "chain:3")
    target, scheduler = split._target.cache, split._scheduler
    request = Request.of(submit("7", PROMPTS[7]), (), arrived_seconds=0.0)
    blocks = [one.block for one in scheduler.reuse.stored(request, 0, len(PROMPTS[7]) // 16)]
    kept = target.read_blocks(blocks)
    assert kept.shape[:2] == (len(blocks), 2)
    assert not torch.equal(kept[:, 0], kept[:, 1]), "each rank has its own heads"
    assert kept.numel() * kept.element_size() == len(blocks) * target.block_bytes
    target.write_blocks(blocks, torch.zeros_like(kept))
    assert not target.read_blocks(blocks).any()
    target.write_blocks(blocks, kept)
    assert torch.equal(target.read_blocks(blocks), kept)
    again = serve(split, "chain:3")
    assert again["7"] == expected
    assert scheduler.counters.prefix_hit_tokens > 0


@pytest.mark.parametrize("shape", ["none", "chain:3", "tree:3,2,1"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_two_ranks_emit_the_same_tokens_as_one(whole: Engine, split: Engine, shape: str, sampling: str) -> None:
    expected = serve(whole, "none", **SAMPLING[sampling])
    assert serve(split, shape, **SAMPLING[sampling]) == expected
    assert all(len(tokens) == 20 for tokens in expected.values())
    assert shape != "tree:3,2,1" or accepted_siblings(split) > 0, "no key has moved on the other rank"


def test_prompt_logprobs_are_equal_on_one_and_two_ranks(whole: Engine, split: Engine) -> None:
    """The logits of a prompt are computed separately from those of the pass."""
    logprobs = []
    for engine in (whole, split):
        engine.add(submit("prompt", PROMPTS[3], prompt_logprobs=2, max_tokens=1))
        logprobs.append([entry for one in drain(engine) for entry in one.prompt_logprobs])
    assert len(logprobs[0]) == len(PROMPTS[3]) - 1
    one, two = (numbers(msgspec.to_builtins(entries)) for entries in logprobs)
    assert one == pytest.approx(two, abs=1e-9)


def test_a_rank_stores_only_its_part_and_reports_its_bytes(whole: Engine, split: Engine) -> None:
    one, two = whole.report().memory, split.report().memory
    assert one is not None
    assert two is not None
    assert isinstance(split._target, LeaderTarget)
    model, cache = split._target._model, split._target.cache
    held = {id(t): t.untyped_storage().nbytes() for t in model.state_dict(keep_vars=True).values()}
    assert two.weights == sum(held.values()) < one.weights
    assert two.drafts == one.drafts
    assert cache.data.shape[4] == SHAPE["num_key_value_heads"] // 2


def test_heads_that_cannot_be_split_are_refused_before_anything_starts(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigMismatch, match="num_attention_heads 4 cannot be split over tensor_parallel_size 3"):
        load_engine(exact_config_of(*folders, 3), Path)


def served(target: Path, head: Path) -> WorkerConfig:
    """Return the config of an engine process, with models given by URI."""
    config = config_of(target, head, model={"uri": f"file://{target}"}, tensor_parallel_size=2)
    return config.model_copy(update={"draft": config.draft.model_copy(update={"uri": f"file://{head}"})})


@pytest.fixture
def doomed(folders: tuple[Path, Path], split: Engine) -> Iterator[tuple[Engine, int]]:
    """Yield an engine of two ranks and the pid of the second.

    The shared engine is closed first, because a process can have only one open.
    """
    split.close()
    before = set(spawned(os.getpid()))
    engine = load_engine(exact_config_of(*folders, 2), Path)
    (second,) = set(spawned(os.getpid())) - before
    yield engine, second
    engine.close()


def small_group() -> RankGroup:
    """Start a second rank without a model."""
    return RankGroup(
        Assignment(
            rank=0, size=2, meeting="", folder="", dtype="float32", quantization=None, device="cpu",
            max_model_len=None, blocks=0, threads=1,
        )
    )  # fmt: skip


class TestLoss:
    """The loss of one rank ends the whole replica."""

    @pytest.mark.parametrize("busy", [False, True])
    def test_an_idle_and_a_busy_engine_report_the_lost_rank(self, doomed: tuple[Engine, int], busy: bool) -> None:
        engine, second = doomed
        with pytest.raises(RankLost, match="rank 1: ended with exit code -9"):  # noqa: PT012 - raised at any time
            os.kill(second, signal.SIGKILL)
            while busy:
                serve(engine, "chain:3")
            time.sleep(20)

    @pytest.mark.parametrize(
        ("main", "reason"),
        [
            (graph_ranks.answer_and_end, "ended with exit code 9"),
            (graph_ranks.write_nonsense, "sent a message that cannot be read"),
        ],
    )
    def test_a_rank_that_leaves_an_unread_message_is_noticed(
        self, split: Engine, monkeypatch: pytest.MonkeyPatch, main: Any, reason: str
    ) -> None:
        split.close()
        monkeypatch.setattr(rank_process, "serve_rank", main)
        group = small_group()
        try:
            with pytest.raises(RankLost, match=f"rank 1: {reason}"):
                time.sleep(30)
        finally:
            group.close()

    def test_a_process_group_that_does_not_end_without_a_rank_ends_with_the_process(
        self, split: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NCCL waits for a collective whose peer died."""
        split.close()
        ended: list[int] = []
        process_ends = threading.Event()
        monkeypatch.setattr(rank_process, "serve_rank", graph_ranks.answer_and_end)
        monkeypatch.setattr(rank_process, "_STUCK_SECONDS", 0.2)
        monkeypatch.setattr(rank_process.os, "_exit", lambda code: (ended.append(code), process_ends.set()))
        monkeypatch.setattr(rank_process.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(rank_process.dist, "destroy_process_group", lambda: process_ends.wait(30))
        group = small_group()
        with pytest.raises(RankLost):
            time.sleep(30)
        group.close()
        assert ended == [1]

    def test_the_engine_process_ends_with_the_reason(self, folders: tuple[Path, Path]) -> None:
        async def lose() -> tuple[str, int]:
            client = EngineClient(served(*folders), None)
            try:
                await asyncio.wait_for(client.loaded, 120)
                (second,) = spawned(client.child.pid)
                os.kill(second, signal.SIGKILL)
                return await asyncio.wait_for(client.ended, 30), second
            finally:
                await client.close()

        reason, _ = asyncio.run(lose())
        assert reason == "rank 1: ended with exit code -9"

    def test_shutdown_ends_all_in_order(self, folders: tuple[Path, Path]) -> None:
        async def shut_down() -> tuple[int, int | None]:
            client = EngineClient(served(*folders), None)
            await asyncio.wait_for(client.loaded, 120)
            (second,) = spawned(client.child.pid)
            await client.close()
            return second, client.child.exit_code

        second, exit_code = asyncio.run(shut_down())
        assert exit_code == 0
        assert not Path(f"/proc/{second}").exists()


def test_quantised_ranks_speculate_without_changing_the_text(split: Engine, folders: tuple[Path, Path]) -> None:
    split.close()  # a process can have only one open
    config = exact_config_of(*folders, 2)
    model = ModelConfig.model_construct(**dict(config.model) | {"quantization": "int8"})
    engine = load_engine(config.model_copy(update={"model": model}), Path)
    try:
        expected = serve(engine, "none", range(4))
        assert serve(engine, "tree:3,2,1", range(4)) == expected
        assert engine.report().accepted_tokens
        assert all(len(tokens) == 20 for tokens in expected.values())
    finally:
        engine.close()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_llama4_emit_the_same_tokens_as_one(split: Engine, ranks: int, tmp_path: Path) -> None:
    """Experts are split, and there are fewer key-value heads than ranks. Texts cross chunks of attention."""
    split.close()  # a process can have only one open
    save_llama4(tmp_path, torch.float64, num_attention_heads=8, head_dim=8, num_hidden_layers=4)
    shape = json.loads((tmp_path / "config.json").read_text())
    fields = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    head = write_head(tmp_path / "head", target=shape, **fields)
    expected = serve(load_engine(exact_config_of(tmp_path, head, 1), Path), "none")
    engine = load_engine(exact_config_of(tmp_path, head, ranks), Path)
    try:
        trees = ("none", "chain:3", "tree:3,2,1")
        for tree in trees if ranks == 2 else by_effort(quick=trees, full=trees[2:], nightly=trees):
            assert serve(engine, tree) == expected
        assert isinstance(engine._target, LeaderTarget)
        assert engine._target.cache.data.shape[4] == max(2 // ranks, 1)
    finally:
        engine.close()
