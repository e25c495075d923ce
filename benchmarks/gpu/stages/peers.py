"""Plain decoding by torch.compile on the same card: a dense Llama after gpt-fast, with random weights of real shape.

Source of the method: https://github.com/meta-pytorch/gpt-fast: a static cache of keys and values, one compiled function
for a step, max-autotune with CUDA graphs. No plan, no paging, no drafts, one sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import torch
from card import clocks
from shapes import LLAMA_8B, TINY
from torch import Tensor
from torch.nn import functional as F

from stages import Run

Row = dict[str, Any]
CONTEXT, LENGTH, STEPS = 128, 512, 200


@dataclass(frozen=True, slots=True)
class Layer:
    """Matrices of a layer and its keys and values, [kv heads, LENGTH, head size] each."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """Network of one sequence; norms have weights of one."""

    shape: dict[str, Any]
    layers: list[Layer]
    embedding: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    ones: Tensor

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the next token [1] after ``token`` [1] at ``position`` [1]."""
        size = self.shape["head_dim"]
        heads, kv = self.shape["num_attention_heads"], self.shape["num_key_value_heads"]
        cos, sin = self.cos[position], self.sin[position]
        mask = (torch.arange(LENGTH, device=token.device) <= position)[None, None]
        x = self.embedding[token]
        for layer in self.layers:
            q, k, v = F.linear(self._norm(x), layer.qkv).view(1, -1, size).split([heads, kv, kv], 1)
            layer.keys.index_copy_(1, position, _rotate(k, cos, sin).transpose(0, 1))
            layer.values.index_copy_(1, position, v.transpose(0, 1))
            q = _rotate(q, cos, sin).transpose(0, 1)[None]
            attended = F.scaled_dot_product_attention(
                q, layer.keys[None], layer.values[None], attn_mask=mask, enable_gqa=True
            )
            x = x + F.linear(attended.reshape(1, -1), layer.o)
            gate, up = F.linear(self._norm(x), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(self._norm(x), self.head).argmax(-1)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.ones, 1e-5)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def dense(shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Dense:
    """Return a network of random weights."""

    def random(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=device).normal_(0, 0.02)

    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    layers = [
        Layer(
            random((heads + 2 * kv) * size, hidden),
            random(hidden, heads * size),
            random(2 * inner, hidden),
            random(hidden, inner),
            random(kv, LENGTH, size),
            random(kv, LENGTH, size),
        )
        for _ in range(shape["num_hidden_layers"])
    ]
    angles = torch.arange(LENGTH)[:, None] / 500_000 ** (torch.arange(0, size, 2) / size)
    tables = (angles.cos()[:, None].to(device, dtype), angles.sin()[:, None].to(device, dtype))
    vocabulary = shape["vocab_size"]
    ones = torch.ones(hidden, dtype=dtype, device=device)
    return Dense(shape, layers, random(vocabulary, hidden), random(vocabulary, hidden), *tables, ones)


def keep_in_place(network: Dense) -> None:
    """Mark all tensors of a network as staying where they are.

    torch.compile captures no graph of a function that writes to others, and copies the others before every replay.
    """
    for owner in (network, *network.layers):
        for each in fields(owner):
            if isinstance(tensor := getattr(owner, each.name), Tensor):
                torch._dynamo.mark_static_address(tensor)  # type: ignore[attr-defined]


def torch_compile(run: Run) -> Iterator[Row]:
    """Milliseconds of a step of one sequence, compiled and not."""
    shapes, dtype = (TINY, torch.float32) if run.dry else (LLAMA_8B, torch.bfloat16)
    network = dense(shapes.target, dtype, run.device)
    ways = {"torch, eager": network.step}
    if not run.dry:
        keep_in_place(network)
        torch._inductor.config.coordinate_descent_tuning = True  # type: ignore[attr-defined]
        for mode in ("reduce-overhead", "max-autotune"):
            ways[f"torch.compile, {mode}"] = torch.compile(network.step, mode=mode, fullgraph=True)
    for name, step in ways.items():
        with torch.inference_mode():
            began = time.perf_counter()
            for _ in range(4):
                step(torch.zeros(1, dtype=torch.int64, device=run.device), torch.tensor([CONTEXT], device=run.device))
            torch.cuda.synchronize()
            compiled = time.perf_counter() - began
            times = _times(step, run)
        row = {"batch": 1, "context": CONTEXT, "step_milliseconds": 1e3 * median(times), "measured_steps": len(times)}
        yield {
            "kind": "peer",
            "peer": name,
            "model": shapes.name,
            **row,
            "seconds_before": compiled,
            "clocks": clocks(),
        }


def _times(step: Any, run: Run) -> list[float]:
    """Return the seconds of each step, in means of ten: the host waits for every tenth, as it would read a stream."""
    steps, times = (3 if run.dry else STEPS), []
    token = torch.zeros(1, dtype=torch.int64, device=run.device)
    positions = [torch.tensor([CONTEXT + at % 256], device=run.device) for at in range(steps)]
    torch.cuda.synchronize()
    for first in range(0, steps, 10):
        began = time.perf_counter()
        for position in positions[first : first + 10]:
            token = step(token, position).clone()
        torch.cuda.synchronize()
        count = len(positions[first : first + 10])
        times += count * [(time.perf_counter() - began) / count]
    return times
