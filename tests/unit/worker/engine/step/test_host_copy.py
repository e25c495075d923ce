"""Copies between device and host: results are copied early and never overwritten, and uploads do not block.

The first token of a prompt is copied before the draft processes the prompt.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import specdecode_worker
from specdecode_kernels.transfer import to_device
from specdecode_worker.core.device_state import to_host
from specdecode_worker.engine import engine as step_launcher
from support.small_llama import engine_of, networks, plan_of, submit


def test_the_first_token_is_copied_before_the_draft_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(networks(torch.float64))
    engine.set_plan(plan_of("chain:3"))
    order: list[str] = []
    follows, copied = engine._drafts.prefill, step_launcher.to_host

    def prefill(*args: Any) -> None:
        order.append("draft")
        follows(*args)

    def leaves(*args: Any, **named: Any) -> Any:
        order.append("token")
        return copied(*args, **named)

    monkeypatch.setattr(engine._drafts, "prefill", prefill)
    monkeypatch.setattr(step_launcher, "to_host", leaves)
    engine.add(submit(0, sampled=False, tokens=4))
    [first] = engine.step()
    assert len(first.tokens) == 1
    assert order == ["token", "draft"]


def test_tensors_that_will_be_overwritten_are_copied() -> None:
    static = torch.tensor([1, 2])
    [copied], arrival = to_host([static], overwritten=True)
    [same], _ = to_host([static])
    static.zero_()
    arrival.wait()
    assert copied.tolist() == [1, 2]
    assert same is static
    assert to_device([3, 4], torch.device("cpu")).tolist() == [3, 4]


STEPS = ("engine", "drafts", "core", "sampling")
"""Packages with code that runs in every step."""


def waiting_copies(source: str) -> list[int]:
    """Return the lines that create a tensor from host values directly on a device.

    Such a copy waits for all queued work.
    """
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    makers = {"torch.tensor", "torch.as_tensor"}
    return [
        call.lineno
        for call in calls
        if ast.unparse(call.func) in makers and any(keyword.arg == "device" for keyword in call.keywords)
    ]


TENSOR_NAME = re.compile(r".*_[A-Z0-9]+$")
"""Names of tensors end in the letters of their dimensions."""


def assigned_numbers(source: str) -> list[int]:
    """Return the lines that assign a number of the host to elements of a tensor.

    Before torch 2.15 such an assignment to one element copies from pageable memory; ``fill_`` never does.
    """
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and _is_tensor(node.targets[0]) and _is_number(node.value)
    ]


def _is_tensor(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and TENSOR_NAME.match(ast.unparse(target.value)) is not None


def _is_number(value: ast.expr) -> bool:
    """Return whether the value is a constant or has a name that is not a tensor's."""
    named = isinstance(value, (ast.Name, ast.Attribute)) and not TENSOR_NAME.match(ast.unparse(value))
    return named or (
        isinstance(value, (ast.Constant, ast.BinOp, ast.UnaryOp)) and not TENSOR_NAME.search(ast.unparse(value))
    )


def test_steps_copy_only_from_pinned_memory() -> None:
    assert waiting_copies("def f(d):\n  return torch.tensor([1], device=d)") == [2], "the search finds what it is for"
    assert assigned_numbers("a_S[1] = end\na_S[1] = 3\na_S[0] = b_S\nself.a_S[s] = -1\na[1] = 1") == [1, 2, 4]
    package = Path(specdecode_worker.__file__).parent
    sources = [path for name in STEPS for path in (package / name).rglob("*.py")]
    assert len(sources) > 35
    assert {str(path): lines for path in sources if (lines := waiting_copies(path.read_text()))} == {}
    assert {str(path): lines for path in sources if (lines := assigned_numbers(path.read_text()))} == {}
