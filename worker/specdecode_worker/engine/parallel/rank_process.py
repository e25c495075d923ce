"""A rank beside rank 0, in a process of its own: holds its part of the target and runs the passes it is told."""

from __future__ import annotations

import os
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from specdecode_worker.engine.drafts.draft_loader import paged_cache
from specdecode_worker.engine.parallel.rank_messages import (
    Assignment,
    Failed,
    Forward,
    Keep,
    Logits,
    Ready,
    Told,
    understood,
)
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.models.configs.target_states import NOTHING
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.tensor_parallel import Shard, load_shard
from specdecode_worker.models.transforms.fusion import fuse

PATIENCE = timedelta(minutes=60)
"""How long a rank waits for the others to load; once they have, none waits for another outside of a pass."""


def main(assignment: bytes, pipe: Connection) -> None:
    """Entry of the process. Ends with rank 0, whose end of the pipe then closes; exits 1 after last words."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _serve(msgspec.msgpack.decode(assignment, type=Assignment), pipe)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # rank 0 is gone, and with it who could shut the group down in order
    except Exception as error:
        if not isinstance(error, ModelError):
            traceback.print_exc()
        words = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        pipe.send_bytes(msgspec.msgpack.encode(Failed(words)))
        os._exit(1)


def load_part(found: Assignment) -> tuple[Llama, torch.device]:
    """Meets the other ranks and loads this one's part of the target."""
    device = torch.device(found.device, found.rank) if found.device == "cuda" else torch.device(found.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(found.threads)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of a replica share a machine
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=found.meeting,
        rank=found.rank,
        world_size=found.size,
        timeout=PATIENCE,
    )
    model = load_shard(
        Path(found.folder),
        Shard(found.rank, found.size),
        dtype=getattr(torch, found.dtype),
        device=device,
        max_model_len=found.max_model_len,
    )
    fuse(model)
    return model, device


@torch.inference_mode()
def _serve(found: Assignment, pipe: Connection) -> None:
    model, device = load_part(found)
    dtype = getattr(torch, found.dtype)
    cache = paged_cache(model.config, model.config.num_hidden_layers, found.blocks, dtype, device)
    pipe.send_bytes(msgspec.msgpack.encode(Ready()))
    decoder = msgspec.msgpack.Decoder(Told)
    while True:
        match decoder.decode(pipe.recv_bytes()):
            case Forward() as message:
                packed, logit_rows_R = understood(message, device)
                Target.run(model, cache, packed, logit_rows_R, NOTHING)
            case Keep(count):
                pairs = torch.empty(2, count, dtype=torch.int64, device=device)
                dist.broadcast(pairs, src=0)
                cache.keep(*pairs)
            case Logits(count):
                hidden_RE = torch.empty(count, model.config.hidden_size, dtype=dtype, device=device)
                dist.broadcast(hidden_RE, src=0)
                model.logits(hidden_RE)
