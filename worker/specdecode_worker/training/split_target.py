"""Target of a training run on one or several devices: the engine that answers, and the network that is trained on.

A network that is split has the engine's own shards. Rank 0 runs everything: it reads texts, trains and writes. The
other ranks hold their shards and run each pass of the target that rank 0 announces, over a pipe; the sums within the
layers are collectives (models/tensor_parallel). The hidden states of a pass are whole on rank 0. Logits are computed
there alone, for training needs the whole output matrix anyway.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from specdecode_worker.bound_process import BoundProcess
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TargetQuantization, WorkerConfig
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import load_engine
from specdecode_worker.engine.tensor_parallel import Assignment, load_rank_shard
from specdecode_worker.models.causal_lm import Attend, CausalLM
from specdecode_worker.models.config import split_config
from specdecode_worker.models.linear import Linear
from specdecode_worker.models.optimize import quantise_target
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.models.weights import load_causal_lm, prepare_causal_lm
from specdecode_worker.training.evaluation import ZeroContextAttention
from specdecode_worker.training.unroll import TextAttention

_CHUNK = 2048
"""Tokens of prompts that a step of the engine reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlacement:
    """Placement of a target: ``size`` devices share it. ``threads`` are those of a rank on a CPU.

    ``quantization`` is that of the workers that serve the target, whose answers it should give.
    """

    folder: Path
    dtype: str
    device: torch.device
    size: int = 1
    threads: int | None = None
    quantization: TargetQuantization | None = None


class TargetPassMessage(msgspec.Struct, frozen=True):
    """Pass of the target: its tokens, their positions, and its attention ("causal" or "zero")."""

    tokens: list[int]
    positions: list[int]
    attention: str


@contextlib.contextmanager
def target_engine(placement: TargetPlacement, *, rows: int, longest: int) -> Iterator[Engine]:
    """Yield an engine of the target alone, for ``rows`` requests of up to ``longest`` tokens, answers included.

    It is gone when the context ends, so that the network that is trained on has its memory.

    Raises:
        ModelError: The target cannot be loaded, or does not fit into memory.
    """
    threads = torch.get_num_threads()
    config = WorkerConfig(
        model=ModelConfig(
            uri=f"file://{placement.folder}",
            served_name="target",
            dtype=placement.dtype,
            quantization=placement.quantization,
            max_model_len=longest,
        ),
        draft=DraftConfig(method="none"),
        engine=EngineConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, _CHUNK),
            device=placement.device.type,
            threads=placement.threads or threads,
            tensor_parallel_size=placement.size,
        ),
    )
    engine = load_engine(config, lambda _: placement.folder)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        torch.set_num_threads(threads)


@contextlib.contextmanager
def placed_target(placement: TargetPlacement) -> Iterator[CausalLM]:
    """Yield the target, and end the other ranks afterwards. The process ends if one of them is lost.

    Raises:
        ModelError: The target cannot be loaded, or not split over so many devices.
    """
    if placement.size == 1:
        dtype: torch.dtype = getattr(torch, placement.dtype)
        # A target that fits only after quantization must not be moved to the device before it.
        first = torch.device("cpu") if placement.quantization else placement.device
        target = load_causal_lm(placement.folder, dtype=dtype, device=first)
        quantise_target(target, placement.quantization, placement.device)
        yield target
        return
    split_config(prepare_causal_lm(placement.folder).network.config, placement.size)
    with tempfile.TemporaryDirectory(prefix="specdecode-ranks-") as meeting:
        assignment = Assignment(
            rank=0,
            size=placement.size,
            meeting=f"file://{meeting}/store",
            folder=str(placement.folder),
            dtype=placement.dtype,
            quantization=placement.quantization,
            device=placement.device.type,
            max_model_len=None,
            blocks=0,
            threads=placement.threads or max(1, torch.get_num_threads() // placement.size),
        )
        try:
            with _other_ranks(assignment) as announce:
                target, device = load_rank_shard(assignment)
                target.lm_head = _whole_output(placement.folder, target, device)
                target.register_forward_pre_hook(announce)
                yield target
        finally:
            # Now that the others have ended: NCCL waits for those of this machine that are in the group.
            if dist.is_initialized():
                dist.destroy_process_group()


def _whole_output(folder: Path, target: CausalLM, device: torch.device) -> Linear:
    """Return the whole output matrix, in place of the part that a shard has."""
    weight = target.model.embed_tokens.weight
    if not target.config.tie_word_embeddings:
        whole = prepare_causal_lm(folder).read_weight("lm_head")
        weight = whole.to(device=device, dtype=weight.dtype)
    return Linear.of(weight)


@contextlib.contextmanager
def _other_ranks(own: Assignment) -> Iterator[Callable[[nn.Module, tuple[Any, ...]], None]]:
    """Start ranks 1 and up, which load their shards, and yield the target's forward pre-hook that sends them a pass.

    They end when their pipes close. This process ends when one of them does, because a collective without it may never
    return.
    """
    pipes: list[Connection] = []
    processes: list[BoundProcess] = []
    closing = threading.Event()

    def announce(target: nn.Module, args: tuple[Any, ...]) -> None:
        tokens_T, positions_T, attend = args[:3]
        assert isinstance(attend, ZeroContextAttention | TextAttention), "other ranks know no other attention"
        attention = "zero" if isinstance(attend, ZeroContextAttention) else "causal"
        encoded = msgspec.msgpack.encode(TargetPassMessage(tokens_T.tolist(), positions_T.tolist(), attention))
        for pipe in pipes:
            pipe.send_bytes(encoded)

    def watch() -> None:
        wait([process.sentinel for process in processes])
        if not closing.is_set():
            print(
                "specdecode-worker: a rank of the target ended; the same command goes on", file=sys.stderr, flush=True
            )
            os._exit(1)

    try:
        for rank in range(1, own.size):
            own_end, rank_end = Pipe()
            encoded = msgspec.msgpack.encode(msgspec.structs.replace(own, rank=rank))
            process = BoundProcess(follow, (encoded, rank_end), f"target-rank-{rank}")
            process.start()
            rank_end.close()
            pipes.append(own_end)
            processes.append(process)
        threading.Thread(target=watch, name="target-ranks", daemon=True).start()
        yield announce
    finally:
        closing.set()
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@torch.inference_mode()
def follow(assignment: bytes, pipe: Connection) -> None:
    """Run the process of another rank until rank 0 closes the pipe."""
    try:
        model, device = load_rank_shard(msgspec.msgpack.decode(assignment, type=Assignment))
        decoder = msgspec.msgpack.Decoder(TargetPassMessage)
        attentions: dict[str, Attend] = {"causal": TextAttention(model.config), "zero": ZeroContextAttention()}
        while True:
            message = decoder.decode(pipe.recv_bytes())
            positions_T = torch.tensor(message.positions, device=device)
            tokens_T = torch.tensor(message.tokens, device=device)
            model(tokens_T, positions_T, attentions[message.attention], TargetStates())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # rank 0 is gone, so an orderly shutdown of the process group is impossible
