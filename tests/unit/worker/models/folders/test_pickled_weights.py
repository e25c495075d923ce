"""Pickled checkpoints: converted in a process of its own, and refused by name where they hold more than tensors."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from specdecode_worker.__main__ import main
from specdecode_worker.models import pickled_weights
from specdecode_worker.models.errors import NotPresent, WeightMismatch
from specdecode_worker.models.fetch import resolve
from specdecode_worker.models.weights import load_causal_lm
from support import small_model
from support.worker.small_folders import loaded_head

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CHILD = pickled_weights._CHILD
LEGACY = {"_use_new_zipfile_serialization": False}
STATE = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4).T,
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.zeros(0, 3, dtype=torch.float16),
    "e": torch.tensor([True, False]),
    "f": torch.nn.Parameter(torch.full((2,), 0.5)),
}


def folder_with(folder: Path, state: Any, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    torch.save(state, folder / "pytorch_model.bin", **options)
    return folder


def pickled(folder: Path, shards: int = 1) -> Path:
    """Replace the safetensors of a folder by pickles of the same tensors."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    files = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    index = {name: files[i % shards] for i, name in enumerate(state)}
    for file in files:
        torch.save({name: tensor for name, tensor in state.items() if index[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["archive", "legacy"])
def test_tensors_are_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = folder_with(tmp_path / "head", STATE, **options)
    converted = pickled_weights.converted_folder(folder, tmp_path / "cache")
    stored = load_file(converted / "model.safetensors")
    assert stored.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor.detach())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "pytorch_model.bin"]
    assert pickled_weights.converted_folder(folder, tmp_path / "cache") == converted
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
    assert pickled_weights.converted_folder(folder, tmp_path / "cache") != converted, "the checkpoint is another one"


def test_an_archive_that_is_compressed_is_read(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "head", {"a": torch.arange(1000.0)}) / "pytorch_model.bin"
    with zipfile.ZipFile(path) as saved:
        records = {name: saved.read(name) for name in saved.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in records.items():
            packed.writestr(name, content)
    converted = pickled_weights.converted_folder(tmp_path / "head", tmp_path / "cache")
    assert torch.equal(load_file(converted / "model.safetensors")["a"], torch.arange(1000.0))


def test_nothing_but_the_cache_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container that pulls models has a root file system that cannot be written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    folder = folder_with(tmp_path / "head", STATE)
    assert (pickled_weights.converted_folder(folder, tmp_path / "cache") / "model.safetensors").is_file()


def test_target_and_head_of_local_folders_load_as_from_safetensors(tmp_path: Path) -> None:
    """`resolve` is where train, eval, check, bench and serve get their folders from."""
    target, head = small_model.write_pair(tmp_path)
    options: Any = {"dtype": torch.float32, "device": CPU}
    wanted = load_causal_lm(target, **options)
    wanted_head = loaded_head("eagle3", head, wanted)
    uris = [f"file://{pickled(folder, shards)}" for folder, shards in ((target, 3), (head, 1))]
    loaded = load_causal_lm(resolve(uris[0], tmp_path), **options)
    head_of_pickles = loaded_head("eagle3", resolve(uris[1], tmp_path), loaded)
    for network, other in ((wanted, loaded), (wanted_head, head_of_pickles)):
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
    cache = ["--cache-dir", str(tmp_path / "cache")]
    assert main(["check", "--model", uris[0], "--draft", uris[1], "--device", "cpu", *cache]) == 0


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_an_index_of_safetensors_that_are_not_there_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A download of the pickles alone still contains the index of the safetensors files that it left out."""
    monkeypatch.setattr(pickled_weights, "_convert_file", lambda source, target: target.write_bytes(b""))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(b"")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00009.safetensors"}}')
    if name != "pytorch_model.bin":
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    converted = pickled_weights.converted_folder(folder, tmp_path / "cache")
    stored = name.removeprefix("pytorch_").replace(".bin", ".safetensors")
    assert (converted / stored).is_file()
    written = converted / index.name
    assert not written.exists() or json.loads(written.read_bytes())["weight_map"] == {"a": stored}


class Runs:
    """Object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def test_a_pickle_that_wants_to_run_something_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for function, arguments, named, options in (
        (os.system, (f"touch {mark}",), r"it wants (posix|os)\.system", {}),
        (eval, (f"open({str(mark)!r}, 'w')",), r"it wants (builtins\.)?eval", LEGACY),
        (shutil.copy, (__file__, str(mark)), r"it wants shutil\.copy", {}),
    ):
        folder = folder_with(tmp_path / "head", {"a": torch.ones(1), "b": Runs(function, *arguments)}, **options)
        with pytest.raises(WeightMismatch, match=rf"pytorch_model\.bin is refused: {named}.*safetensors"):
            pickled_weights.converted_folder(folder, tmp_path / "cache")
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(os.system, f"touch {mark}")))
    with pytest.raises(WeightMismatch, match="is refused"):
        pickled_weights.converted_folder(tmp_path / "head", tmp_path / "cache")
    assert not mark.exists()
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


SANDBOX = """
import os, socket, subprocess, sys
sys.path.insert(0, {folder!r})
import pickle_child
tried = {{}}
def attempt(name, action):
    try:
        action()
        tried[name] = "done"
    except (OSError, MemoryError) as error:
        tried[name] = type(error).__name__
pickle_child.limit(1000)
attempt("socket", lambda: socket.socket())
attempt("pair", lambda: socket.socketpair())
attempt("program", lambda: os.execv("/bin/true", ["true"]))
attempt("memory", lambda: bytearray(4 << 30))
attempt("file", lambda: open({mark!r}, "w"))
attempt("removal", lambda: os.remove({other!r}))
print(tried, sorted(os.environ))
"""


def test_the_process_can_do_nothing_else(tmp_path: Path) -> None:
    """On a kernel with seccomp and Landlock, the process can do nothing of it without `weights_only` either."""
    (other := tmp_path / "other").write_text("kept")
    script = SANDBOX.format(folder=str(CHILD.parent), mark=str(tmp_path / "made"), other=str(other))
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, env={}, check=False)
    tried, _, names = done.stdout.strip().rpartition(" ")
    results = dict(eval(tried))
    assert results.pop("memory") == "MemoryError"
    assert names == "[]" or "LC_CTYPE" in names
    status = Path("/proc/self/status").read_text()
    if "Seccomp_filters" in status:
        assert (results.pop("socket"), results.pop("pair")) == ("PermissionError", "PermissionError")
        assert results.pop("program") == "PermissionError"
    if ctypes.CDLL(None).syscall(444, None, 0, 1) > 0:  # landlock_create_ruleset returns the version of Landlock
        assert results == {"file": "PermissionError", "removal": "PermissionError"}
        assert other.read_text() == "kept"


def expanded() -> dict[str, torch.Tensor]:
    return {"lm_head.weight": torch.ones(1).expand(5_000_000_000)}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (expanded, r"lm_head\.weight claims 20\.0 GB, more than the file of 0\.0 GB holds"),
        (lambda: {"a": torch.ones(2), "epoch": 3}, "epoch is of type int; only tensors are read"),
        (lambda: [torch.ones(2)], "holds no state_dict"),
        (lambda: {"a": torch.ones(2).to_sparse()}, "a has dtype torch.float32 and layout torch.sparse_coo"),
        (lambda: {"a": torch.ones(2, dtype=torch.complex64)}, "a has dtype torch.complex64"),
        (lambda: {"a": {"b": torch.ones(2)}}, "a is of type dict"),
    ],
)
def test_other_contents_are_refused_by_name(tmp_path: Path, state: Callable[[], Any], reason: str) -> None:
    folder = folder_with(tmp_path / "head", state())
    with pytest.raises(WeightMismatch, match=rf"pytorch_model\.bin is refused: .*{reason}"):
        pickled_weights.converted_folder(folder, tmp_path / "cache")


def test_truncated_and_invented_files_are_refused(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "head", {"a": torch.ones(100_000)}) / "pytorch_model.bin"
    whole = path.read_bytes()
    for content in (whole[:-1000], whole[:1000], b"", b"no pickle", b"\x80\x04."):
        path.write_bytes(content)
        with pytest.raises(WeightMismatch, match=r"pytorch_model\.bin is refused: (?!Check the documentation)"):
            pickled_weights.converted_folder(tmp_path / "head", tmp_path / "cache")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", b"\0" * (1 << 28))
    with pytest.raises(WeightMismatch, match=r"pytorch_model\.bin is refused"):
        pickled_weights.converted_folder(tmp_path / "head", tmp_path / "cache")


def test_an_index_that_names_other_files_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "head", STATE)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../other.bin"}}')
    with pytest.raises(WeightMismatch, match=r"other\.bin"):
        pickled_weights.converted_folder(folder, tmp_path / "cache")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_cache_that_cannot_be_written_is_named(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "head", STATE)
    error = OSError(code, os.strerror(code))  # root, who runs this too, may write everywhere
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=error))
    with pytest.raises(NotPresent, match="--cache-dir"):
        pickled_weights.converted_folder(folder, tmp_path / "cache")
