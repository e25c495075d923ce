"""Captured steps of two ranks over gloo: texts are those of one rank, and every rank replays the same graphs.

`EagerBackend` stands in for CUDA graphs: a replay makes the captured calls again, collectives included.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdecode_worker.contract import DraftConfig
from specdecode_worker.core.device_state import PagedCache
from specdecode_worker.core.errors import RankLost
from specdecode_worker.engine import cuda_graphs as step_graphs
from specdecode_worker.engine import factory
from specdecode_worker.engine import tensor_parallel as rank_graphs
from specdecode_worker.engine import tensor_parallel as rank_group
from specdecode_worker.engine.cuda_graphs import (
    CaptureFailed,
    EagerBackend,
    RankCaptureFailed,
    StagedBackend,
    StepGraphs,
    Work,
)
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import load_engine
from specdecode_worker.engine.tensor_parallel import LeaderBackend, RankGraphs, StepShape
from support.worker.graph_ranks import (
    SAMPLING,
    FailingBackend,
    ShortBackend,
    accepted_siblings,
    serve,
    serve_with,
    set_plan,
)
from support.worker.small_engine import submit
from support.worker.small_folders import exact_config_of, write_head

SHAPES = ("none", "chain:3", "tree:3,2,1")


@contextmanager
def captured_ranks(
    folders: tuple[Path, Path], *, main: Any = None, own: StagedBackend | None = None, **engine: Any
) -> Iterator[Engine]:
    """Yield an engine of two ranks that captures steps on a CPU; ``main`` is that of the second rank's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "capture_backend", lambda device: own or EagerBackend())
        if main is not None:
            patch.setattr(rank_group, "serve_rank", main)
        settings = {"cuda_graph_sizes": [1, 4, 8], "max_num_batched_tokens": 128, **engine}
        made = load_engine(exact_config_of(*folders, 2, **settings), Path)
    try:
        yield made
    finally:
        made.close()


def graphs_of(engine: Engine) -> StepGraphs:
    assert engine._graphs is not None
    return engine._graphs


@pytest.fixture(scope="class")
def split(folders: tuple[Path, Path]) -> Iterator[Engine]:
    with captured_ranks(folders) as engine:
        yield engine


class TestTexts:
    @pytest.mark.parametrize("sampling", SAMPLING)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_texts_are_those_of_one_rank(self, whole: Engine, split: Engine, shape: str, sampling: str) -> None:
        """Add a request every second step, so that steps have prompt chunks and replayed graphs."""
        graphs = graphs_of(split)
        before, mixed, eager = graphs.replayed, graphs.mixed, graphs.eager.copy()
        text = serve(split, shape, every=2, **SAMPLING[sampling])
        assert text == serve(whole, "none", **SAMPLING[sampling])
        assert graphs.replayed - before > 10
        assert graphs.mixed > mixed
        assert set(graphs.eager - eager) <= {"prefill", "new"}
        assert shape != "tree:3,2,1" or accepted_siblings(split) > 0, "no key has moved on the other rank"

    def test_cached_prefixes_are_read_by_graphs(self, whole: Engine, split: Engine) -> None:
        before = split.report().prefix_hit_tokens
        text = serve(split, "chain:3")
        assert split.report().prefix_hit_tokens > before
        assert text == serve(whole, "none")

    def test_a_step_sends_one_short_message_and_no_tensor(self, split: Engine, monkeypatch: Any) -> None:
        """The other rank gets the number of the graph; inputs travel inside of the graph."""
        serve(split, "chain:3")
        set_plan(split, "chain:3")
        split.add(submit("one", (1, 2, 3)))
        split.step()
        sent: list[bytes] = []
        ranks = split._target._ranks  # type: ignore[attr-defined]
        pipe = SimpleNamespace(send_bytes=lambda data, to=ranks._pipes[0].send_bytes: (sent.append(data), to(data)))
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "_pipes", [pipe])
            patch.setattr(ranks, "send_with", None)
            split.step()
            split.step()
        assert len(sent) == 2
        assert all(b"Replay" in message and len(message) < 32 for message in sent)
        while not split.idle:
            split.step()

    def test_features_are_captured_while_serving(self, whole: Engine, split: Engine) -> None:
        graphs = graphs_of(split)
        before = len(graphs)
        penalised: dict[str, Any] = {"frequency_penalty": 0.5, "logprobs": 2}
        assert serve(split, "chain:3", range(4), **penalised) == serve(whole, "none", range(4), **penalised)
        assert len(graphs) > before

    def test_a_graph_that_gives_way_is_gone_on_all_ranks(
        self, whole: Engine, split: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each capture checks that all ranks hold as many graphs."""
        graphs = graphs_of(split)
        serve(split, "chain:3")
        monkeypatch.setattr(step_graphs, "MOST_GRAPHS", most := len(graphs))
        for penalised in ({"presence_penalty": 0.5}, {"presence_penalty": 0.5, "logprobs": 2}):
            assert serve(split, "chain:3", range(4), **penalised) == serve(whole, "none", range(4), **penalised)
            assert len(graphs) == most
        assert any(key.features.history and not key.features.logprobs for key in graphs._graphs)

    def test_a_changed_plan_is_captured_while_serving(
        self, whole: Engine, split: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The log counts the graphs of the ranks."""
        graphs = graphs_of(split)
        before = {key.passes for key in graphs._graphs}
        with caplog.at_level(logging.INFO):
            text = serve(split, "none", every=2, between=lambda: set_plan(split, "chain:2"))
        assert f"{len(graphs)} graphs on each of 2 ranks" in caplog.text
        assert text == serve(whole, "none")
        assert {key.passes for key in graphs._graphs} - before - {0} == {2}, "plain steps may have been captured before"

    def test_a_draft_swap_replaces_its_graphs_on_all_ranks(self, whole: Engine, split: Engine, tmp_path: Path) -> None:
        """Running requests go on with the new draft. Both ranks keep the graphs without passes of the draft."""

        def swap() -> None:
            assert split.load_draft is not None
            head = write_head(tmp_path / "head", draft_vocab_size=48)
            before = dict(graphs_of(split)._graphs)
            split.set_draft("", split.load_draft(DraftConfig(method="eagle3", uri=str(head)), ""))
            after = graphs_of(split)._graphs
            kept = {key for key in before if after.get(key) is before[key]}
            assert kept == {key for key in before if not key.passes} != set()
            captured = {key.passes for key in after.keys() - kept}
            assert 0 not in captured, "those of steps without the draft were kept"
            assert 3 in captured, "the plan's are captured at the swap, after those that were used most"
            backend = graphs_of(split)._backend
            assert len(after) == len(backend._graphs) < backend._captures  # type: ignore[attr-defined]
            set_plan(split, "chain:3")

        expected = serve(whole, "none")
        assert serve(split, "chain:3", every=2, between=swap) == expected
        assert len(graphs_of(split)) > 0
        assert serve(split, "tree:3,2,1") == expected


def test_texts_are_those_of_two_eager_ranks(folders: tuple[Path, Path]) -> None:
    """Steps are launched ahead, as on a GPU: blocks of the next step reach the other rank before this one is read."""
    texts = []
    for settings in ({}, {"enforce_eager": True}):
        with captured_ranks(folders, **settings) as engine:
            assert (engine._graphs is None) is bool(settings)
            engine._ahead = 1
            texts.append([serve(engine, shape, every=2, **SAMPLING["truncated"]) for shape in SHAPES])
    assert texts[0] == texts[1]


def test_multi_round_sampling_before_and_after_a_plan_change(folders: tuple[Path, Path]) -> None:
    """Graphs of the second plan's shape are captured while requests are served."""
    texts = []
    for settings in ({}, {"enforce_eager": True}):
        with captured_ranks(folders, sampler="mss", **settings) as engine:
            texts.append([serve(engine, shape, range(4), temperature=1.0) for shape in ("chain:2", "tree:2,2")])
            if not settings:
                assert graphs_of(engine).replayed > 10
    assert texts[0] == texts[1]


class TestFailure:
    """A rank that cannot capture: all ranks run eagerly."""

    @pytest.mark.parametrize("backend", [FailingBackend, ShortBackend], ids=["record", "rehearse"])
    def test_the_other_rank_fails(
        self, whole: Engine, folders: tuple[Path, Path], backend: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with captured_ranks(folders, main=partial(serve_with, backend)) as engine, caplog.at_level(logging.WARNING):
            text = serve(engine, "chain:3", every=2)
            graphs = graphs_of(engine)
            assert len(graphs) == graphs.replayed == 0
            assert graphs.eager["failed"] > 5
            assert serve(engine, "tree:3,2,1") == text == serve(whole, "none")
        (line,) = [one.getMessage() for one in caplog.records if "without graphs" in one.getMessage()]
        assert "rank 1: RuntimeError: " in line

    @pytest.mark.parametrize(
        ("backend", "reason"),
        [(FailingBackend, "CUDA error: operation failed"), (ShortBackend, "out of memory")],
        ids=["record", "rehearse"],
    )
    def test_rank_0_fails(
        self, whole: Engine, folders: tuple[Path, Path], backend: Any, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with captured_ranks(folders, own=backend()) as engine, caplog.at_level(logging.WARNING):
            assert serve(engine, "chain:3") == serve(whole, "none")
            assert graphs_of(engine).replayed == 0
        assert f"rank 0: RuntimeError: {reason}" in caplog.text


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_a_killed_rank_ends_the_replica(folders: tuple[Path, Path], when: str) -> None:
    with captured_ranks(folders) as engine:
        (process,) = engine._target._ranks._processes  # type: ignore[attr-defined]
        if when == "replay":
            serve(engine, "chain:3")
        with pytest.raises(RankLost, match="rank 1: ended with exit code -9"):  # noqa: PT012 - raised at any time
            os.kill(process.pid, signal.SIGKILL)
            while True:
                serve(engine, "chain:3")


def test_draft_passes_alone_are_captured_on_the_first_rank() -> None:
    """In steps with grammars the draft passes have their own graph, and the other ranks get no message about it."""
    shapes = [StepShape(1, 1, 0), None]  # of the graph before, and of this one
    target: Any = SimpleNamespace(take_shape=lambda: shapes.pop(0))
    ranks: Any = SimpleNamespace()  # a message would raise AttributeError
    runs: list[int] = []
    captured = LeaderBackend(EagerBackend(), target, ranks).capture(lambda: runs.append(1))
    captured.replay()
    captured.release()
    assert len(runs) == 2


def test_draft_passes_alone_that_fail_cost_no_other_graph() -> None:
    """The other ranks do not know of them, so their graphs and those of this rank can still be replayed."""
    target: Any = SimpleNamespace(take_shape=lambda: None)
    ranks: Any = SimpleNamespace()  # a message would raise AttributeError
    with pytest.raises(CaptureFailed, match="rank 0: RuntimeError: out of memory") as failed:
        LeaderBackend(ShortBackend(), target, ranks).capture(lambda: None)
    assert not isinstance(failed.value, RankCaptureFailed)


def test_a_rank_keeps_the_static_tensors_of_its_graphs() -> None:
    """A CUDA graph refers to addresses and keeps no tensor alive."""

    class ForgetfulBackend(EagerBackend):
        def record(self, work: Work) -> Work:
            return lambda: None

    cache = PagedCache(
        layers=1, blocks=2, heads=1, kv_heads=1, head_dim=4, dtype=torch.float64, device=torch.device("cpu")
    )
    graphs = RankGraphs(None, cache, ForgetfulBackend())  # type: ignore[arg-type]
    graphs.open_table(2, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_graphs.RankStep, "run", lambda self: None)
        graphs.prepare(StepShape(1, 1, 0))
        reference = weakref.ref(graphs._prepared._flat)  # type: ignore[union-attr]
        graphs.record()
    gc.collect()
    assert reference() is not None
    graphs.clear()
    gc.collect()
    assert reference() is None
