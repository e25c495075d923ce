"""Tests of `pull` against a local test hub: a folder counts as present only if it is complete and verified."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from specdecode_worker.__main__ import main
from specdecode_worker.contract import Env, WorkerConfig
from specdecode_worker.models import download, download_folder
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.errors import AccessDenied, DiskFull, HashMismatch, HubUnreachable, NotOnHub, NotPresent
from support.published.hub import COMMIT, Repository, StandInHub

WEIGHTS = random.Random(5).randbytes(1_024_000)
PART = 100_000
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b'{"a": 1}',
    "tokenizer.model": b"spm",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "additional_chat_templates/../../up.jinja": b"no",
    "README.md": b"no",
    "pytorch_model.bin": b"never",
    "original/params.json": b"no",
}
TEMPLATE = "additional_chat_templates/tool_use.jinja"
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja", TEMPLATE}
MODEL = model_store.hub_model("hf://org/model")

Pull = Callable[..., Path]
Command = Callable[..., tuple[int, str]]


def nothing(*_: object) -> None:
    pass


@pytest.fixture
def pull(tmp_path: Path) -> Iterator[Pull]:
    with ExitStack() as stack:

        def pull(repository: Repository, token: str | None = None, progress: download.Progress = nothing) -> Path:
            stand_in = stack.enter_context(StandInHub(repository))
            server = download.Hub(stand_in.url, token, retry_seconds=0)
            stack.callback(server.close)
            return server.pull(MODEL, tmp_path, progress, nothing)

        yield pull


FULL = OSError(errno.ENOSPC, "No space left on device")


def stopping(name: str, error: BaseException, *, whole: bool = False) -> download.Progress:
    """Return a callback that raises ``error`` once bytes of a file are there, with ``whole`` all of them."""

    def progress(file: str, there: int, size: int) -> None:
        if file == name and (there == size or not whole):
            raise error

    return progress


def partials(tmp_path: Path) -> list[Path]:
    return sorted(MODEL.folder(tmp_path).glob("model.safetensors.*.partial"))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PART_BYTES", PART)


def test_only_used_files_are_fetched(pull: Pull, tmp_path: Path) -> None:
    repository = Repository(FILES)
    folder = pull(repository)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == WANTED | {download_folder.MANIFEST}
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    manifest = json.loads((folder / download_folder.MANIFEST).read_text())
    assert manifest["commit"] == COMMIT
    digests = {file["name"]: file["digest"] for file in manifest["files"]}
    assert digests == {name: hashlib.sha256(FILES[name]).hexdigest() for name in WANTED}
    assert model_store.resolve("hf://org/model", tmp_path) == folder


def test_bytes_are_on_the_disk_before_what_says_that_they_are_there(
    pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power undoes what was not flushed, and must not leave marks of parts or a manifest over zeros."""
    flushed: list[int] = []
    counts: dict[Path, list[int]] = {}
    fsync, replace = os.fsync, os.replace

    def record_flush(file: int) -> None:
        fsync(file)
        flushed.append(os.fstat(file).st_ino)

    def record_replace(partial: Path, done: Path) -> None:
        replace(partial, done)
        counts[done] = list(flushed)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(os, "replace", record_replace)
    folder = pull(Repository(FILES))
    before = counts[folder / download_folder.MANIFEST]
    assert {path for path in folder.rglob("*") if path.is_file() and path.stat().st_ino not in before} == set()
    assert before.count((folder / "model.safetensors").stat().st_ino) == -(-len(WEIGHTS) // PART), "at each mark"


def test_bytes_that_a_disk_does_not_take_at_once_are_written_again(pull: Pull, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is nearly full takes a part of a write, and may have room for the rest a moment later."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[: (len(data) + 1) // 2], at))
    assert (pull(Repository(FILES)) / "model.safetensors").read_bytes() == WEIGHTS


def test_parts_are_received_apart_and_go_on_where_a_connection_broke(pull: Pull) -> None:
    repository = Repository(FILES, cut_after=PART // 3 + 1)
    folder = pull(repository)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = {asked for method, path, asked in repository.requests if method == "GET" and "/storage/" in path}
    starts = {part + cut * (PART // 3 + 1) for part in range(0, len(WEIGHTS), PART) for cut in range(3)}
    ends = {start: min(start - start % PART + PART, len(WEIGHTS)) for start in starts if start < len(WEIGHTS)}
    assert ranges == {f"bytes={start}-{end - 1}" for start, end in ends.items()}


def killed_pull(url: str, cache: Path, pieces: int) -> int:
    """Pull in a process that kills itself after so many pieces of the weights, and return its exit code."""
    if (child := os.fork()) == 0:
        left = [pieces]

        def kill(name: str, received: int, size: int) -> None:
            left[0] -= name == "model.safetensors"
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            download.Hub(url, None).pull(MODEL, cache, kill, nothing)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_fifty_kills_at_random_bytes_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed keeps the parts that it has received, and the next one asks for no more of them."""
    draws, repository, read = random.Random(11), Repository(FILES), download.Hub.read

    def in_pieces(*args: Any) -> Iterator[bytes]:
        for chunk in read(*args):
            yield from (chunk[at : at + 997] for at in range(0, len(chunk), 997))

    monkeypatch.setattr(download.Hub, "read", in_pieces)
    monkeypatch.setattr(download, "PART_BYTES", part := len(WEIGHTS) // 4)
    with StandInHub(repository) as stand_in:
        download.Hub(stand_in.url, None).pull(MODEL, tmp_path, nothing, nothing)  # imports what the processes need
        shutil.rmtree(tmp_path / "hf")
        codes = [killed_pull(stand_in.url, tmp_path / str(n // 5), draws.randrange(1, 400)) for n in range(50)]
        assert codes.count(-signal.SIGKILL) > 25, codes
        for cache in sorted(tmp_path.iterdir()):
            folder = MODEL.folder(cache)
            marks = b"".join(path.read_bytes() for path in folder.glob("model.*.parts"))
            there = len(WEIGHTS) if (folder / "model.safetensors").is_file() else part * marks.count(b"\1")
            repository.requests.clear()
            download.Hub(stand_in.url, None).pull(MODEL, cache, nothing, nothing)
            assert (folder / "model.safetensors").read_bytes() == WEIGHTS
            asked = sum(method == "GET" and "/storage/" in path for method, path, _ in repository.requests)
            assert asked <= -(-max(0, len(WEIGHTS) - there) // part), "parts that were received are kept"


def test_hub_without_range_support_is_read_from_the_first_byte(pull: Pull) -> None:
    assert (pull(Repository(FILES, ignores_range=True)) / "model.safetensors").read_bytes() == WEIGHTS


def test_connection_without_data_raises(pull: Pull, tmp_path: Path) -> None:
    with pytest.raises(HubUnreachable, match=r"model\.safetensors breaks off at \d+ bytes"):
        pull(Repository(FILES, cut_after=0))
    with pytest.raises(NotPresent, match="specdecode-worker pull"):
        model_store.resolve("hf://org/model", tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_download_with_a_wrong_hash_is_rejected(pull: Pull, tmp_path: Path, name: str) -> None:
    with pytest.raises(HashMismatch, match=f"{name} has hash"):
        pull(Repository(FILES, tampered=name))
    assert partials(tmp_path) == []
    with pytest.raises(NotPresent):
        model_store.resolve("hf://org/model", tmp_path)
    assert (pull(Repository(FILES)) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_flipped_byte_of_a_part_that_was_kept_is_refused(pull: Pull, tmp_path: Path) -> None:
    with pytest.raises(DiskFull):
        pull(Repository(FILES), progress=stopping("model.safetensors", FULL, whole=True))
    (partial,) = partials(tmp_path)
    with partial.open("r+b") as file:
        file.write(bytes([WEIGHTS[0] ^ 1]))
    with pytest.raises(HashMismatch, match=r"model\.safetensors has hash"):
        pull(Repository(FILES))


def test_gated_model_without_a_token_names_the_secret(pull: Pull) -> None:
    with pytest.raises(AccessDenied, match=r"HF_TOKEN.*tokenSecretRef"):
        pull(Repository(FILES, token="secret"))
    with pytest.raises(AccessDenied, match="is not valid, or has no access; check it, and accept the model's terms"):
        pull(Repository(FILES, token="secret"), token="another")


def test_token_is_sent_to_the_hub_only(pull: Pull) -> None:
    # The test hub redirects large files to another host name, which fails if it receives the token.
    assert (pull(Repository(FILES, token="secret"), token="secret") / "model.safetensors").is_file()


def test_full_disk_is_reported_before_downloading(pull: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    repository = Repository(FILES)
    with pytest.raises(DiskFull, match=r"needs 0\.0 GB more"):
        pull(repository)
    assert not any(method == "GET" and "/resolve/" in path for method, path, _ in repository.requests)


def test_a_model_that_a_pods_cache_cannot_hold_is_refused_before_downloading(
    pull: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of-another-model").write_bytes(bytes(1000))
    used = 1000 + download_folder._SPARE_BYTES
    repository = Repository(FILES)
    monkeypatch.setenv(Env.cache_limit, f"{used + 10} {tmp_path}")
    with pytest.raises(DiskFull, match=r"model cache holds .* set spec\.modelCache"):
        pull(repository)
    assert not any(method == "GET" and "/resolve/" in path for method, path, _ in repository.requests)
    monkeypatch.setenv(Env.cache_limit, f"{used + 2_000_000} {tmp_path}")
    assert (pull(repository) / "model.safetensors").is_file()


def test_pull_resumes_after_the_disk_was_full(pull: Pull, tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="it goes on from here"):
        pull(Repository(FILES), progress=stopping("model.safetensors", FULL))
    assert partials(tmp_path)[0].stat().st_size > 0
    assert (pull(Repository(FILES)) / "model.safetensors").read_bytes() == WEIGHTS


INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00002.safetensors"


def test_a_pull_of_a_newer_commit_keeps_no_file_of_the_older_one(pull: Pull) -> None:
    sharded = {"config.json": b"{1}", INDEX: b"{}", SHARD: b"1", "model-00002-of-00002.safetensors": WEIGHTS}
    older = sharded | {"chat_template.jinja": b"of the older commit", TEMPLATE: b"{{ old }}"}
    with pytest.raises(KeyboardInterrupt):
        pull(Repository(older), progress=stopping("model-00002-of-00002.safetensors", KeyboardInterrupt()))
    newer = {"config.json": b"{2}", "model.safetensors": WEIGHTS}
    folder = pull(Repository(newer))
    files = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop(download_folder.MANIFEST))
    assert files == newer
    assert {file["name"] for file in manifest["files"]} == newer.keys()


def test_a_kill_before_a_file_has_its_name_leaves_no_older_file(pull: Pull, monkeypatch: pytest.MonkeyPatch) -> None:
    older, killed = {"config.json": b"{1}", "model.safetensors": WEIGHTS}, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pull(Repository(older), progress=stopping("model.safetensors", killed))
    newer = {"config.json": b"{2}", "model.safetensors": WEIGHTS}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=killed))
        with pytest.raises(KeyboardInterrupt):
            pull(Repository(newer))
    assert (pull(Repository(newer)) / "config.json").read_bytes() == b"{2}"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"config.json": b"{}", "medusa_lm_head.pt": b"", "model.gguf": b""},
            "medusa_lm_head.pt, model.gguf cannot be read",
        ),
        ({"config.json": b"{}", "consolidated.safetensors": b""}, r"consolidated\.safetensors cannot be read"),
        ({"config.json": b"{}"}, r"holds neither \*\.safetensors nor pytorch_model"),
    ],
)
def test_repositories_without_safetensors_are_refused(pull: Pull, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(NotOnHub, match=message):
        pull(Repository(files))


@pytest.mark.parametrize("weights", ["model-00001-of-00001.safetensors", "pytorch_model.bin"])
def test_mistrals_copy_of_the_weights_is_not_fetched(weights: str) -> None:
    wanted = download.wanted_files("m", ["config.json", "consolidated.safetensors", weights])
    assert wanted == ["config.json", weights]


def test_busy_hub_is_retried(pull: Pull) -> None:
    assert pull(Repository(FILES, busy=3)).is_dir()


def test_endpoint_that_is_no_hub_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HubUnreachable, match="cannot be reached"):
        download.Hub("http://127.0.0.1:9", None, retry_seconds=0).pull(MODEL, tmp_path, nothing, nothing)


@pytest.mark.slow
def test_a_pull_asks_the_endpoint_for_the_model_only(tmp_path: Path) -> None:
    """The pull runs in a new process, because huggingface_hub makes its other requests once per process."""
    with StandInHub(Repository(FILES)) as stand_in:
        env = {**os.environ, "HF_ENDPOINT": stand_in.url, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "specdecode_worker", "pull", "hf://org/model", "--cache-dir", str(tmp_path)]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
        assert stand_in.unknown == []


def test_a_revision_that_does_not_exist_is_named(tmp_path: Path) -> None:
    model = model_store.hub_model("hf://org/model@v9")
    with StandInHub(Repository(FILES)) as stand_in, pytest.raises(NotOnHub, match="org/model@v9"):
        download.Hub(stand_in.url, None, retry_seconds=0).pull(model, tmp_path, nothing, nothing)


def test_second_pull_waits_for_the_first(tmp_path: Path) -> None:
    notes: list[str] = []
    folder = MODEL.folder(tmp_path)
    folder.mkdir(parents=True)
    repository = Repository(FILES)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock, StandInHub(repository) as stand_in:
        fcntl.flock(lock, fcntl.LOCK_EX)
        noted = threading.Event()

        def note(text: str) -> None:
            notes.append(text)
            noted.set()

        server = download.Hub(stand_in.url, None)
        second = threading.Thread(target=lambda: server.pull(MODEL, tmp_path, nothing, note))
        second.start()
        assert noted.wait(10)
        assert repository.requests == [], "it did not wait"
        fcntl.flock(lock, fcntl.LOCK_UN)
        second.join(10)
    assert "waiting" in notes[0]
    assert (folder / download_folder.MANIFEST).is_file()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Return a function that runs `specdecode-worker pull ...` against the test hub: its exit code and its output."""
    with StandInHub(Repository(FILES)) as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)

        def command(*words: str) -> tuple[int, str]:
            return main(["pull", *words]), capsys.readouterr().err

        yield command


def test_pull_command_shows_progress_and_the_folder(command: Command, tmp_path: Path) -> None:
    code, said = command("hf://org/model", "--cache-dir", str(tmp_path))
    assert code == 0, said
    assert "model.safetensors  100 %  of 1.0 MB" in said
    assert f"hf://org/model is in {MODEL.folder(tmp_path)}" in said


@pytest.mark.parametrize(
    "uri", ["hf://org", "hf://org/../x", "hf://org/m@..", "ftp://x", "file://x", "pvc://c/../d", "pvc://"]
)
def test_invalid_uri_lists_the_valid_forms(command: Command, tmp_path: Path, uri: str) -> None:
    code, said = command(uri, "--cache-dir", str(tmp_path))
    assert code == 1
    assert "write " in said


def pod(tmp_path: Path, model: str = "hf://org/model", **draft: Any) -> str:
    config = {"model": {"uri": model, "served_name": "m"}, "cache_dir": str(tmp_path), "draft": draft}
    return WorkerConfig.model_validate(config).model_dump_json()


@pytest.mark.parametrize(("required", "code"), [(False, 0), (True, 1)])
def test_pull_without_the_draft_fails_only_if_it_is_required(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: bool, code: int
) -> None:
    monkeypatch.setenv(Env.config, pod(tmp_path, method="eagle3", uri="hf://org/no-draft", required=required))
    ended, said = command()
    assert ended == code
    assert "org/no-draft" in said


def test_the_last_line_names_the_target_that_is_not_there(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator shows the last line of an init container as the cause."""
    draft = "embedded://smollm2-135m-instruct-eagle3"
    monkeypatch.setenv(Env.config, pod(tmp_path, model="embedded://nosuch", method="eagle3", uri=draft))
    code, said = command()
    assert code == 1
    assert "there is no embedded model 'nosuch'" in said.splitlines()[-1]


def test_a_wrong_config_names_the_field(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.config, '{"model": {"uri": "hf://a/b", "served_name": "m", "dtyp": "x"}}')
    code, said = command()
    assert code == 2
    assert "model.dtyp" in said
    monkeypatch.delenv(Env.config)
    assert command()[0] == 2
