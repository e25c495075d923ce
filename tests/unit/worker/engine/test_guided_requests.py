"""Guided requests in the engine: compilation apart from steps, refusals, cancellation, and chains of forced tokens."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.request import Choice, Selection, given_tokens, with_forced_tokens
from specdecode_worker.engine.scheduler import GrammarQueue
from specdecode_worker.guided.guide import GrammarRefused, Guide
from specdecode_worker.sampling.trees import PLAIN, given_chain, tree_of
from support.small_llama import VOCABULARY
from support.worker.accounts import check_engine
from support.worker.small_engine import drain, small_engine, submit


class SlowCompiler:
    """Compiler that waits for ``go`` and then refuses every grammar, or returns a guide."""

    def __init__(self, guide: Any = None) -> None:
        self.go, self.arguments, self._guide = threading.Event(), [], guide

    def guide(self, grammar: str, *, min_tokens: int, blocked: tuple[int, ...]) -> Any:
        self.go.wait(10)
        self.arguments.append((grammar, min_tokens, blocked))
        if self._guide is None:
            raise GrammarRefused("this grammar is bad")
        return self._guide


def engine_with(compiler: Any) -> Any:
    engine = small_engine(max_num_seqs=2)
    engine._grammars = GrammarQueue(compiler, engine.eos_token_ids)
    return engine


def guided(name: str = "guided", **fields: Any) -> Any:
    return submit(name, max_tokens=5, grammar="g", **fields)


def test_other_requests_are_answered_during_a_compilation() -> None:
    compiler = SlowCompiler()
    engine = engine_with(compiler)
    engine.add(guided())
    engine.add(submit("plain", max_tokens=5))
    finished = [new for _ in range(12) for new in engine.step() if new.finish]
    assert [new.request_id for new in finished] == ["plain"]
    assert not engine.idle, "the guided request still waits"
    compiler.go.set()
    (refused,) = [new for new in drain(engine) if new.finish]
    assert (refused.request_id, refused.finish, refused.error) == ("guided", "error", "this grammar is bad")
    check_engine(engine)


def test_a_request_can_be_cancelled_during_its_compilation() -> None:
    compiler = SlowCompiler()
    engine = engine_with(compiler)
    for name in ("a", "b"):
        engine.add(guided(name))
    for name in ("a", "b"):
        engine.abort(name)
    assert engine.idle
    compiler.go.set()
    assert not drain(engine)
    check_engine(engine)


def test_a_deadline_passes_during_a_compilation() -> None:
    compiler = SlowCompiler()
    engine = engine_with(compiler)
    engine.add(structs.replace(guided(), deadline_seconds=time.monotonic() + 0.05))
    (last,) = [new for new in drain(engine) if new.finish]
    assert last.finish == "deadline"
    compiler.go.set()


def test_an_engine_without_tokenizer_refuses_grammars() -> None:
    engine = small_engine(max_num_seqs=2)
    with pytest.raises(ValueError, match="tokenizer"):
        engine.add(guided())
    assert engine.idle


class Panic(BaseException):
    """Error like a panic of a Rust library, which is no Exception."""


def library() -> Mock:
    """Return a compiler whose guides allow every token. It is their matcher too."""
    made = Mock()
    made.guide.side_effect = lambda grammar, **_: Guide(made, (), VOCABULARY)
    made.is_stopped.return_value = made.is_error.return_value = False
    made.deep_copy.return_value = made
    made.compute_ff_tokens.return_value = []
    made.try_consume_tokens.side_effect = len
    made.unsafe_compute_mask_ptr.side_effect = lambda place, size: ctypes.memset(place, 255, size)
    return made


@pytest.mark.parametrize(
    "method", ["guide", "compute_ff_tokens", "try_consume_tokens", "unsafe_compute_mask_ptr", "none"]
)
def test_a_panic_of_the_library_ends_one_request_alone(method: str) -> None:
    panicking = library()
    getattr(panicking, method).side_effect = Panic("index out of bounds")
    engine = engine_with(panicking)
    engine.add(guided())
    engine.add(submit("plain", max_tokens=5))
    last = {new.request_id: new for new in drain(engine) if new.finish}
    assert last["plain"].finish == "length"
    assert last["guided"].finish == ("length" if method == "none" else "error")
    assert ("index out of bounds" in last["guided"].error) == (method != "none")
    check_engine(engine)


CHAIN_3 = tree_of(TreeShape.chain(3))


@pytest.mark.parametrize(
    ("forced", "left", "tree", "wanted"),
    [
        (None, 20, CHAIN_3, CHAIN_3),
        ((), 20, CHAIN_3, CHAIN_3),
        ((1, 2), 20, CHAIN_3, CHAIN_3),
        ((1, 2, 3), 20, CHAIN_3, given_chain(3)),
        ((1, 2), 20, PLAIN, given_chain(2)),
        ((1, 2, 3), 3, PLAIN, given_chain(2)),
        ((1, 2, 3), 1, PLAIN, PLAIN),
    ],
)
def test_forced_tokens_replace_trees_that_are_not_deeper(forced: Any, left: int, tree: Any, wanted: Any) -> None:
    guide = None if forced is None else SimpleNamespace(forced=lambda: forced)
    sampling = SimpleNamespace(max_tokens=left)
    asked: Any = SimpleNamespace(guide=guide, emitted=0, submit=SimpleNamespace(sampling=sampling))
    selection = with_forced_tokens(Selection([tree], Choice(shape=TreeShape.chain(3), shadow_passes=2)), [asked])
    assert list(selection.trees) == [wanted]
    if wanted.given:
        assert given_tokens(asked, wanted) == (forced or ())[: wanted.depth]
        assert (selection.choice.shape, selection.choice.shadow_passes) == (None, 0)
    else:
        assert given_tokens(asked, wanted) == ()
        assert selection.choice.shape == TreeShape.chain(3)
