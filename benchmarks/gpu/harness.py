"""An engine over random networks, with texts that stand in its caches as if they had been prefilled.

Built as a worker builds its own (engine/factory.assemble). Contexts are not computed: random keys and values fill the
caches, and the blocks are made known as somebody's beginning, so that requests are admitted behind them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from networks import make_loud, random_target, write_config, write_head
from shapes import Shapes
from torch import nn

from specdecode_kernels import dependent
from specdecode_kernels.small_linear import op as small_linear
from specdecode_worker.contract import (
    DraftConfig,
    EngineConfig,
    ModelConfig,
    NamedDraft,
    Plan,
    SyntheticKnobs,
    TaskMatch,
    TreeShape,
)
from specdecode_worker.contract import WorkerConfig as Config
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.core.messages import Submit
from specdecode_worker.core.request import Request
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import assemble
from specdecode_worker.engine.memory import Budget, Device, Network
from specdecode_worker.models.causal_lm import CausalLM, Experts
from specdecode_worker.models.optimize import fuse
from specdecode_worker.sampling.params import Sampling

SECOND_TASK = "second"
"""Task, and name of its draft, where two drafts are loaded."""
_TASKS = (TaskMatch(name=SECOND_TASK, draft=SECOND_TASK),)
MOST_ROOM = 2048
WARM_SECONDS = 0.3
"""Steps run for this long before they are measured, so that the clocks have risen."""
_LARGEST_TREE = 65
"""Nodes; a tree for which a step has no tokens left would run plainly."""


@dataclass(slots=True)
class Bench:
    """``target_bytes`` and ``draft_bytes`` are what a pass reads, without tables that are only looked up in;
    ``fuse_bytes`` of the draft are read once a step, however many passes follow."""

    shapes: Shapes
    engine: Engine
    device: torch.device
    batches: tuple[int, ...]
    context: int
    target_bytes: int
    draft_bytes: int
    fuse_bytes: int
    experts: int
    expert_bytes: int
    """Bytes of one of the ``experts`` of each layer, which are not in ``target_bytes``; 0 without experts."""
    kv_bytes: int
    draft_kv_bytes: int
    two_drafts: bool
    """Half of the texts are drafted for by a second head."""
    products_error: float
    """See the function of this name."""
    right: bool
    """Whether every draft is right."""
    plans: int = field(default=0)

    def run_shape(self, shape: TreeShape) -> None:
        self.plans += 1
        name = self.engine.draft.hash
        tasks = _TASKS if self.two_drafts else ()
        self.engine.set_plan(Plan(draft=name, version=self.plans, initial=shape, explore=0, guard=False, tasks=tasks))

    def launch_ahead(self, on: bool) -> None:
        """Switch the launch of a step before the previous one is read. A GPU's engine does so from the start."""
        self.engine._ahead = 1 if on else 0

    def start_early(self, on: bool) -> None:
        """Switch early starts of kernels, and discard the steps that were captured before."""
        dependent.ENABLED = on
        if (graphs := self.engine._graphs) is not None:
            graphs.clear()

    def take_eager_steps(self) -> dict[str, int]:
        """Steps that no graph ran since the last call, by reason."""
        graphs = self.engine._graphs
        if graphs is None:
            return {}
        found = dict(graphs.eager)
        graphs.eager.clear()
        return found

    def accept_as(self, chance: float | None) -> None:
        self.engine.set_synthetic(None if chance is None else SyntheticKnobs(acceptance=(chance,)))

    def bytes_of(self, batch: int, shape: TreeShape, context: int) -> int:
        """Return the bytes that a step must read: the target and all keys once, the draft and its keys in every pass.

        Tokens are assumed to choose experts evenly.
        """
        passes, keys = shape.depth, batch * context
        chosen = self.experts * (1 - (1 - 1 / self.experts) ** (batch * (1 + shape.nodes)))
        draft = passes * (self.draft_bytes + keys * self.draft_kv_bytes) + (self.fuse_bytes if passes else 0)
        return self.target_bytes + int(chosen * self.expert_bytes) + keys * self.kv_bytes + draft

    def measure(self, batch: int, steps: int, context: int | None = None) -> dict[str, float]:
        """Milliseconds from step to step with ``batch`` texts, host and device overlapping as they do when serving, and
        tokens per text and step."""
        self.begin(batch, context)
        times, tokens = [], 0
        torch.cuda.synchronize()
        last = time.perf_counter()
        for _ in range(steps):
            tokens += sum(len(new.tokens) for new in self.engine.step())
            now = time.perf_counter()
            times.append(now - last)
            last = now
        self.end(batch)
        return {
            "step_milliseconds": 1e3 * median(times),
            "mean_milliseconds": 1e3 * sum(times) / steps,
            "measured_steps": steps,
            "measured_tokens_per_step": tokens / (steps * batch),
        }

    def begin(self, batch: int, context: int | None = None) -> None:
        """Admits ``batch`` texts and runs until all of them decode and their graph is captured."""
        for submit in self._submits(batch, min(context or self.context, self.context)):
            self.engine.add(submit)
        started: set[str] = set()
        while len(started) < batch:
            started |= {new.request_id for new in self.engine.step()}
        tokens, began = 0, time.perf_counter()
        while time.perf_counter() - began < WARM_SECONDS and tokens < room(batch) // 4:
            tokens += sum(len(new.tokens) for new in self.engine.step() if new.request_id == "0")

    def end(self, batch: int) -> None:
        """Cancels the texts of `begin`."""
        for index in range(batch):
            self.engine.abort(str(index))
        self.drain()

    def drain(self) -> None:
        while not self.engine.idle:
            self.engine.step()

    def fill(self, batch: int) -> None:
        """Makes the beginnings of ``batch`` texts known."""
        scheduler, drafts = self.engine._scheduler, self.engine._drafts
        for submit in self._submits(batch, self.context):
            request = Request.of(submit, (), arrived_seconds=0.0)
            drafts.assign_draft(request)
            whole = (len(submit.prompt) - 1) // BLOCK_SIZE
            taken = scheduler._pool.allocate(whole, room=whole)
            assert taken is not None, "the caches were made for fewer texts"
            request.blocks, request.cached = taken, whole * BLOCK_SIZE
            scheduler.reuse.publish(request, request.cached)
            scheduler._pool.release(taken)

    def _submits(self, batch: int, context: int) -> Iterable[Submit]:
        """Requests whose prompts are the first ``context`` tokens of the known beginnings."""
        for index in range(batch):
            prompt = (index + 8, *[11] * (context - 1))
            sampling = Sampling(max_tokens=room(batch), seed=index, temperature=1.0, ignore_eos=True)
            task = SECOND_TASK if self.two_drafts and index % 2 else "other"
            yield Submit(request_id=str(index), prompt=prompt, sampling=sampling, task=task)


def room(batch: int) -> int:
    """Return the tokens that a text may grow by while it is measured with ``batch`` texts."""
    return MOST_ROOM if batch <= 4 else MOST_ROOM // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to build; ``batches`` are those that will be measured."""

    shapes: Shapes
    batches: tuple[int, ...]
    context: int
    dtype: torch.dtype
    device: torch.device
    eager: bool = False
    draft_quantization: str | None = None
    sampler: str = "coupled"
    two_drafts: bool = False
    batched_tokens: int = 1024
    """At least this many tokens in a step; more where the largest trees of the largest batch need them."""
    always_right: bool = True
    """Whether target and draft agree on one token. Without it a text of random weights wanders."""
    filled: bool = True
    """Whether texts of ``context`` tokens stand in the caches; without it every prompt is computed."""

    @property
    def most(self) -> int:
        return max(self.batches)


def build(asked: Asked) -> Bench:
    """The engine, and as many texts as were asked for in its caches."""
    target = random_target(asked.shapes, asked.dtype, asked.device)
    error = products_error(target)
    if asked.always_right:
        make_loud(target)
    with tempfile.TemporaryDirectory(prefix="specdecode-gpu-") as folder:  # a head has a gigabyte
        where = Path(folder, "target"), Path(folder, "head")
        write_config(asked.shapes, where[0])
        write_head(asked.shapes, target, where[1], asked.dtype, asked.device)
        config = _config(asked, *where)
        budget = _budget(asked, config, target)
        engine = assemble(
            target, where[0], config, lambda uri: Path(uri.removeprefix("file://")), budget, lambda: "random"
        )
    caches = engine._target.cache.data, _draft_cache(engine)
    for cache in caches:
        cache.normal_()
    bench = _bench(asked, engine, target, error, *caches)
    bench.launch_ahead(True)
    _capture_what_is_used(engine)
    if asked.two_drafts:
        engine._drafts.set_tasks(_TASKS)
    if asked.filled:
        bench.fill(asked.most)
    return bench


def kv_bytes_per_token(shapes: Shapes, dtype: torch.dtype) -> int:
    """Target's and draft's."""
    return sum(
        2 * one["num_hidden_layers"] * one["num_key_value_heads"] * one["head_dim"] * dtype.itemsize
        for one in (shapes.target, shapes.head)
    )


def _config(asked: Asked, target: Path, head: Path) -> Config:
    quantization = {"quantization": asked.draft_quantization} if asked.draft_quantization else {}
    length = asked.context + MOST_ROOM
    draft = DraftConfig(method="eagle3", uri=f"file://{head}", required=True, **quantization)
    second = NamedDraft(name=SECOND_TASK, **draft.model_dump())
    return Config(
        model=ModelConfig(
            uri=f"file://{target}",
            served_name="bench",
            dtype=str(asked.dtype).removeprefix("torch."),
            max_model_len=length,
        ),
        draft=draft,
        drafts=(second,) if asked.two_drafts else (),
        engine=EngineConfig(
            max_num_seqs=asked.most,
            max_num_batched_tokens=max(asked.batched_tokens, asked.most * _LARGEST_TREE),
            kv_cache_tokens=max(batch * (asked.context + room(batch) + 4 * BLOCK_SIZE) for batch in asked.batches),
            device=asked.device.type,
            sampler=asked.sampler,
            enforce_eager=asked.eager,
            cuda_graph_sizes=tuple(sorted(asked.batches)),
        ),
    )


def _budget(asked: Asked, config: Config, target: CausalLM) -> Budget:
    """Only the bounds of it count: how many tokens the caches hold is asked for."""
    memory = Device(kind="cuda", limit=2**40, free=2**40, source="a benchmark")
    shape = target.config
    network = Network(
        name="target",
        weights=0,
        tables=0,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        kv_layers=shape.num_hidden_layers,
    )
    positions, dtype = shape.max_position_embeddings, getattr(torch, config.model.dtype)
    length = min(config.model.max_model_len or positions, positions)
    return Budget(device=memory, engine=config.engine, max_model_len=length, dtype_bytes=dtype.itemsize, target=network)


def products_error(target: CausalLM) -> float:
    """Fuse the target, and return how far its layers and logits are from those without the product of few rows.

    Every layer gets the six rows that it got before. Distances then do not add up from layer to layer, where rounding
    lets a token choose another expert. A distance is that over the length of a result: the median of the layers, or the
    distance of the logits if that is larger.
    """
    device = target.lm_head.weight.device
    tokens = torch.arange(20, 26, device=device)
    positions = torch.arange(6, device=device)
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    calls: list[tuple[Any, torch.Tensor]] = []

    def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    with torch.no_grad():
        hooks = [layer.register_forward_hook(lambda _, *call: calls.append(call)) for layer in target.model.layers]
        with mock.patch.object(small_linear, "MOST_ROWS", 0):
            hidden_TE = target(tokens, positions, attend).hidden_TE
            logits_TV = target.logits(hidden_TE)
        for hook in hooks:
            hook.remove()
        fuse(target)
        layers = zip(target.model.layers, calls, strict=True)
        of_layers = median(_distance(layer(*given), wanted) for layer, (given, wanted) in layers)
        return max(of_layers, _distance(target.logits(hidden_TE), logits_TV))


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the distance of two results over the length of the second."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _capture_what_is_used(engine: Engine) -> None:
    """Capture a graph at its first step: a plan's other shapes, buckets and cuts are not measured."""
    if (graphs := engine._graphs) is not None:
        graphs._capture_after_steps = 1
        graphs.prepare = lambda wanted: None  # type: ignore[method-assign]


def _bench(
    asked: Asked, engine: Engine, target: CausalLM, error: float, cache: torch.Tensor, draft_cache: torch.Tensor
) -> Bench:
    head: Any = engine._drafts._drafts[""].drafter._head
    fuse_bytes = _bytes(head.fc)
    layers = [module for module in target.modules() if isinstance(module, Experts)]
    of_experts = sum(_bytes(one) - _bytes(one.shared_expert) - _bytes(one.router) for one in layers)
    count = layers[0].router.out_features if layers else 1
    per_token = cache.nbytes // (cache.shape[2] * BLOCK_SIZE), draft_cache.nbytes // (cache.shape[2] * BLOCK_SIZE)
    return Bench(
        asked.shapes,
        engine,
        asked.device,
        asked.batches,
        asked.context,
        _bytes(target) - target.model.embed_tokens.weight.nbytes - of_experts,
        _bytes(head) - fuse_bytes,
        fuse_bytes,
        count,
        of_experts // count,
        *per_token,
        asked.two_drafts,
        error,
        asked.always_right,
    )


def _bytes(network: nn.Module) -> int:
    """Of its matrices and norms: every float of its state, and what quantised ones keep beside it."""
    learned = {id(t): t for t in network.state_dict(keep_vars=True).values()}
    return sum(t.nbytes for t in learned.values() if t.dtype != torch.int64)


def _draft_cache(engine: Engine) -> torch.Tensor:
    found: torch.Tensor = engine._drafts._drafts[""].drafter._cache.data
    return found
