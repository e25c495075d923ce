"""Process of a rank other than 0: it holds its shard of the target and runs the passes that rank 0 sends."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from specdecode_worker.engine.drafts.draft_loader import paged_cache
from specdecode_worker.engine.graphs.capture_backends import EagerBackend, capture_backend
from specdecode_worker.engine.parallel.rank_graphs import RankGraphs, problem_of
from specdecode_worker.engine.parallel.rank_messages import (
    Assignment,
    CaptureState,
    Discard,
    Failed,
    Forward,
    Keep,
    Logits,
    OpenTable,
    Prepare,
    RankMessage,
    Ready,
    Record,
    Replay,
    SetBlocks,
    receive_forward,
)
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.models.configs.target_states import NO_STATES
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.linear import Shard
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.tensor_parallel import load_shard
from specdecode_worker.models.optimize import fuse, quantise_target

COLLECTIVE_TIMEOUT = timedelta(minutes=60)
"""Timeout of collectives. It must cover the load time of the slowest rank; later, ranks wait only within a pass."""


def main(assignment: bytes, pipe: Connection) -> None:
    """Run the process of a rank. Exit with 0 when rank 0 closes the pipe, with 1 after a Failed message."""
    try:
        _serve(msgspec.msgpack.decode(assignment, type=Assignment), pipe)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # rank 0 is gone, so an orderly shutdown of the process group is impossible
    except Exception as error:
        if not isinstance(error, ModelError):
            traceback.print_exc()
        words = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        pipe.send_bytes(msgspec.msgpack.encode(Failed(words)))
        os._exit(1)


def load_rank_shard(assignment: Assignment) -> tuple[Llama, torch.device]:
    """Join the process group of all ranks and load the shard of this rank. Return the shard and its device."""
    device = (
        torch.device(assignment.device, assignment.rank)
        if assignment.device == "cuda"
        else torch.device(assignment.device)
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # NCCL would register the buffers of captured collectives, for which ranks may exchange addresses during the
        # capture: a rank that fails to capture would leave the others waiting there.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    else:
        torch.set_num_threads(assignment.threads)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks of a replica run on one machine
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=assignment.meeting,
        rank=assignment.rank,
        world_size=assignment.size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    model = load_shard(
        Path(assignment.folder),
        Shard(assignment.rank, assignment.size),
        dtype=getattr(torch, assignment.dtype),
        # A part that fits only after quantization must not be moved to the device before it.
        device=torch.device("cpu") if assignment.quantization else device,
        max_model_len=assignment.max_model_len,
    )
    quantise_target(model, assignment.quantization, device)
    fuse(model)
    return model, device


@torch.inference_mode()
def _serve(assignment: Assignment, pipe: Connection) -> None:
    model, device = load_rank_shard(assignment)
    dtype = getattr(torch, assignment.dtype)
    cache = paged_cache(model.config, model.config.num_hidden_layers, assignment.blocks, dtype, device)
    graphs = RankGraphs(model, cache, lambda: capture_backend(device) or EagerBackend())
    pipe.send_bytes(msgspec.msgpack.encode(Ready()))
    decoder = msgspec.msgpack.Decoder(RankMessage)
    while True:
        match decoder.decode(pipe.recv_bytes()):
            case Replay(graph):
                graphs.replay(graph)
            case SetBlocks(entries):
                graphs.set_blocks(entries)
            case Forward() as message:
                packed, logit_rows_R = receive_forward(message, device)
                Target.run(model, cache, packed, logit_rows_R, NO_STATES)
            case Keep(count):
                pairs = torch.empty(2, count, dtype=torch.int64, device=device)
                dist.broadcast(pairs, src=0)
                cache.keep(*pairs)
            case Logits(count):
                hidden_RE = torch.empty(count, model.config.hidden_size, dtype=dtype, device=device)
                dist.broadcast(hidden_RE, src=0)
                model.logits(hidden_RE)
            case OpenTable(slots, columns):
                graphs.open_table(slots, columns)
            case Prepare(shape):
                _answer(pipe, graphs, partial(graphs.prepare, shape))
            case Record():
                graphs.warm_up()
                _answer(pipe, graphs, graphs.record)
            case Discard(None):
                graphs.clear()
            case Discard(int(graph)):
                graphs.discard(graph)


def _answer(pipe: Connection, graphs: RankGraphs, stage: Callable[[], None]) -> None:
    """Run one stage of a capture, and tell rank 0 how it ended."""
    problem = problem_of(stage)
    pipe.send_bytes(msgspec.msgpack.encode(CaptureState(len(graphs), problem)))
