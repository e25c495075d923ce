"""The whole engine on interpreted kernels: text and acceptance equal those of the engine in plain PyTorch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from specdecode_kernels import dispatch
from specdecode_kernels.small_linear import op as small_linear
from specdecode_kernels.tree_attention import plan
from specdecode_kernels.verify import kernel as verify
from specdecode_worker.engine.cuda_graphs import EagerBackend
from specdecode_worker.guided.grammars import GrammarCompiler, regex_grammar
from support.char_tokenizer import END, tokenizer_json
from support.small_llama import engine_of, networks, plan_of, submit, texts

pytestmark = pytest.mark.slow

KERNELS = ("small_linear", "rms_norm", "rope_cache", "silu_mul", "top_k", "tree_attention", "verify", "kv_keep")
CASES = {
    "greedy chain": ("chain:2", False, {}),
    "sampled tree": ("tree:2,1", True, {}),
    "processed tree": ("tree:2,1", True, {"presence_penalty": 0.7, "logit_bias": ((5, 2.0), (7, -3.0))}),
}


@pytest.mark.parametrize(
    ("case", "rows", "fused"),
    [
        ("greedy chain", (3,), True),
        ("processed tree", (), False),
        ("sampled tree", (3,), False),
    ],
    ids=str,
)
def test_text_and_acceptance(
    case: str, rows: tuple[int, ...], fused: bool, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``rows``, steps run as in graphs, where most rows are padding. ``fused`` is for products of few rows."""
    shape, sampled, processors = CASES[case]
    requests = [submit(i, sampled=sampled, tokens=6, **processors) for i in (0, 1)]
    on_reference = engine_of(networks(torch.float32))
    on_reference.set_plan(plan_of(shape))
    text = texts(on_reference, requests)

    calls: Counter[str] = Counter()
    _use_kernels(monkeypatch)
    if fused:
        monkeypatch.setattr(small_linear, "LEAST_OUTPUTS", 1)
    for module in KERNELS:
        _count(module, calls, monkeypatch)
    on_kernels = engine_of(networks(torch.float32), backend=EagerBackend() if rows else None, rows=rows)
    on_kernels.set_plan(plan_of(shape))
    assert texts(on_kernels, requests) == text
    one, two = on_reference.report(), on_kernels.report()
    assert (one.drafts, one.accepted_tokens) == (two.drafts, two.accepted_tokens)
    assert one.accepted_tokens > 0
    if on_kernels._graphs is not None:
        assert on_kernels._graphs.replayed > sum(on_kernels._graphs.eager.values())
    keeps = {"kv_keep"} if "tree" in shape or rows else set()
    assert set(calls) - {"silu_mul", "small_linear"} == {"rms_norm", "rope_cache", "top_k", "attend", "choose", *keeps}
    assert ("small_linear" if fused else "silu_mul") in calls


@pytest.mark.parametrize(("sampled", "rows"), [(False, ()), (True, (3,))], ids=["greedy", "sampled-graphs"])
def test_guided_text(sampled: bool, rows: tuple[int, ...], poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that choose tokens respect the masks of grammars, with and without other parameters."""
    compiler = GrammarCompiler(tokenizer_json, 61, (END,))
    grammar = regex_grammar("[a-f]{2,3}(-[0-9])*")
    requests = [submit(0, sampled=sampled, tokens=6, grammar=grammar), submit(1, sampled=sampled, tokens=6)]

    def answers() -> dict[str, list[int]]:
        engine = engine_of(
            networks(torch.float32),
            grammars=compiler,
            eos_token_ids=(END,),
            pipelined=True,
            backend=EagerBackend() if rows else None,
            rows=rows,
        )
        engine.set_plan(plan_of("tree:2,1"))
        return texts(engine, requests)

    text = answers()
    _use_kernels(monkeypatch)
    assert answers() == text
    guide = compiler.guide(grammar)
    guide.advance(text[requests[0].request_id])
    assert not guide.error


def _use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "on_gpu", lambda _: True)
    monkeypatch.setattr(plan, "processors", lambda _: 4)
    monkeypatch.setattr(verify, "processors", lambda _: 2)


def _count(module: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    kernel = import_module(f"specdecode_kernels.{module}.kernel")
    name = {"tree_attention": "attend", "verify": "choose"}.get(module, module)
    right = getattr(kernel, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return right(*args, **kwargs)

    monkeypatch.setattr(kernel, name, counted)
