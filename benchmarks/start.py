"""Measure the stages of a worker's start for each place of its model, and compare them with the bandwidth at hand.

    python benchmarks/start.py --gigabytes 1 --folder /tmp/start --out out/start.json      # about 3 minutes

A random Llama comes from a hub (the stand-in of the tests), a bucket (SeaweedFS), a claim (a folder whose pages were
dropped) and a node's cache (the folder that the hub's start filled, once with its pages dropped and once as it is).
Each start is a process of its own: `pull`, then the engine. ``floor`` of a pull is its bytes over the slower of
loopback and disk, that of reading the bytes over the rate of the disk. ``hash_on_one_thread`` is what a start took
besides when it read all weights again to hash them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import described
from safetensors.torch import save_file

from specdecode_worker import stages
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, WorkerConfig
from specdecode_worker.engine.factory import load_engine
from specdecode_worker.models.arch import causal_lm_config, new_network
from specdecode_worker.models.download import upload
from specdecode_worker.models.fetch import resolve
from specdecode_worker.models.unloaded import meta_init

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.published.hub import Repository, StandInHub
from support.storage_servers.s3_server import s3_server

HUB, BUCKET = "hf://org/model", "s3://models/llama"
PIECE = 1 << 22
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LAYERS_A_GIGABYTE = 30


def main() -> None:
    args = _arguments()
    if args.start:
        print(json.dumps(_start(args.start, args.folder)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    model = args.folder / "model"
    size = _write(model, max(2, round(LAYERS_A_GIGABYTE * args.gigabytes)))
    rates = _rates(args.folder, model)
    floors = {
        "pull": size / min(rates["loopback"], rates["write"]),
        "read": size / rates["read"],
        "hash_on_one_thread": size / rates["sha256"],
    }
    rows = dict(_rows(args.folder, model))
    document = {
        **described(),
        "command": f"python benchmarks/start.py --gigabytes {args.gigabytes:g}",
        "bytes": size,
        "bytes_per_second": rates,
        "floor": floors,
        "seconds": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"{'seconds':24}" + "".join(f"{name:>11}" for name in names))
    for source, row in rows.items():
        print(f"{source:24}" + "".join(f"{row[name]:11.2f}" for name in names))
    print("floor: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in floors.items()))


def _rows(folder: Path, model: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each source with the seconds of its start by stage."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with StandInHub(Repository(files)) as hub:
        del files
        yield "hub", _started(HUB, folder / "hub", {"HF_ENDPOINT": hub.url})
    servers = folder / "s3"
    servers.mkdir(exist_ok=True)
    with s3_server(servers) as server:
        os.environ.update(server.environment)
        server.make_bucket("models")
        upload(model, BUCKET)
        yield "bucket", _started(BUCKET, folder / "bucket", {})
    _drop(model)
    yield "claim", _started(f"file://{model}", folder / "none", {})
    _drop(folder / "hub")
    yield "node cache, from disk", _started(HUB, folder / "hub", {})
    yield "node cache, in memory", _started(HUB, folder / "hub", {})


def _started(uri: str, cache: Path, environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds of `pull` and of the stages of the engine's start in processes of their own."""
    cache.mkdir(exist_ok=True)
    environment = os.environ | environment
    began = time.perf_counter()
    pull = [sys.executable, "-m", "specdecode_worker", "pull", uri, "--cache-dir", str(cache)]
    subprocess.run(pull, env=environment, check=True, stderr=subprocess.DEVNULL)
    pulled = time.perf_counter()
    command = [sys.executable, __file__, "--start", uri, "--folder", str(cache)]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    stages_: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return {"fetch": pulled - began, **stages_, "engine": time.perf_counter() - pulled}


def _start(uri: str, cache: Path) -> dict[str, float]:
    """Load an engine as a worker does, and return the seconds of the stages."""
    model = ModelConfig(uri=uri, served_name="model", dtype="bfloat16", max_model_len=512)
    engine = EngineConfig(device="cpu", max_num_seqs=1, kv_cache_tokens=1024)
    config = WorkerConfig(model=model, draft=DraftConfig(method="none"), engine=engine)
    load_engine(config, partial(resolve, cache_dir=cache)).close()
    stages.finish_start()
    found = stages.start_seconds()
    assert found is not None
    return found.model_dump()


def _write(folder: Path, layers: int) -> int:
    """Write the model, a file for every eight layers, and return the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"num_hidden_layers": layers}
    with meta_init():
        shapes = {name: tensor.shape for name, tensor in new_network(causal_lm_config(config)).state_dict().items()}
    shapes.pop("lm_head.weight")
    generator, files = torch.Generator().manual_seed(1), dict[str, list[str]]()
    for name in shapes:
        part = int(name.split(".")[2]) // 8 + 1 if ".layers." in name else 0
        files.setdefault(f"model-{part:05}.safetensors", []).append(name)
    for file, names in files.items():
        tensors = {name: (0.02 * torch.randn(shapes[name], generator=generator)).bfloat16() for name in names}
        save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _rates(folder: Path, model: Path) -> dict[str, float]:
    """Return bytes a second of loopback, of writing and reading files, and of sha256 on one thread."""
    paths = sorted(model.glob("*.safetensors"))
    data = paths[-1].read_bytes()
    written = folder / "written"
    with _timed(len(data)) as write, written.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written.unlink()
    _drop(model)
    with _timed(sum(path.stat().st_size for path in paths)) as read:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.read(PIECE):
                    pass
    with _timed(len(data)) as sha256:
        hashlib.sha256(data)
    with _timed(len(data)) as loopback:
        _send(data)
    return {"loopback": loopback[0], "write": write[0], "read": read[0], "sha256": sha256[0]}


@contextmanager
def _timed(size: int) -> Iterator[list[float]]:
    """Time the block; the list then has bytes a second."""
    rate: list[float] = []
    began = time.perf_counter()
    yield rate
    rate.append(size / (time.perf_counter() - began))


def _send(data: bytes) -> None:
    """Send bytes over loopback, and receive them."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.sendall(data)

        sender = threading.Thread(target=serve)
        sender.start()
        with socket.create_connection(server.getsockname()) as connection:
            while connection.recv(PIECE):
                pass
        sender.join()


def _drop(folder: Path) -> None:
    """Drop the pages of a folder's files from memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model (default: %(default)s)")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is measured; it needs four copies")
    parser.add_argument("--out", type=Path, default=Path("out/start.json"))
    parser.add_argument("--start", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
