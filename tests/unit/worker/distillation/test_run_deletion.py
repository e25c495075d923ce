"""Deletion from the data of a distillation run, by user and by age."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from specdecode_worker.__main__ import main
from specdecode_worker.capture import ReadStats, Record, opening_hash, read_records
from specdecode_worker.capture.segments import derived_key, keyed_hash
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.training.artifacts import Ancestor, check_same_target
from specdecode_worker.training.conversations import Conversation, read_shard, shard_paths, write_shard
from specdecode_worker.training.distillation.deletion import delete_expired_from_runs
from specdecode_worker.training.distillation.pool import read_pool
from specdecode_worker.training.errors import ResumeMismatch
from support.worker.distillation_runs import write

KEY = derived_key("token")


def record(number: int) -> Record:
    return Record(
        tokens=tuple(range(number, number + 8)), prompt_length=4, sampling=Sampling(max_tokens=4, seed=0),
        target="t", task="a", time_seconds=float(number), opening=opening_hash(str(number)),
        user=keyed_hash(KEY, "alice" if number % 2 else "bob"),
    )  # fmt: skip


def conversation(one: Record) -> Conversation:
    states = torch.zeros(7, 4)
    return Conversation(torch.tensor(one.tokens[:-1]).int(), torch.zeros(7, 12), states, 4, 0.0, one.task)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two shards of four records, of which every second is alice's."""
    train = tmp_path / "run" / "data" / "train"
    train.mkdir(parents=True)
    for index in range(2):
        records = [record(10 * index + i) for i in range(4)]
        path = write_shard(train, index, [conversation(one) for one in records])
        path.with_suffix(".records").write_bytes(msgspec.msgpack.encode(records))
    (tmp_path / "run" / "data" / "summary.json").write_text(json.dumps({}))
    return tmp_path / "run"


def left(run: Path) -> list[int]:
    """Return the first tokens of the records that are left, and check that shards and records agree."""
    firsts: list[int] = []
    for shard in shard_paths(run / "data" / "train"):
        records = msgspec.msgpack.decode(shard.with_suffix(".records").read_bytes(), type=list[Record])
        texts = [one.tokens_N.tolist() for one in read_shard(shard)]
        assert texts == [list(one.tokens[:-1]) for one in records]
        firsts += [text[0] for text in texts]
    return firsts


def delete_user(user: str, run: Path) -> int:
    """Delete the records of a user with the token that their hashes were made with."""
    tokens = run.with_name("tokens")
    tokens.write_text("token\n")
    return main(["capture", "delete", "--user", user, "--token-file", str(tokens), str(run)])


def test_records_of_a_user_are_deleted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert delete_user("alice", run) == 0
    assert left(run) == [0, 2, 10, 12]
    assert "4 records deleted" in capsys.readouterr().out


@pytest.mark.parametrize("selected", [True, False])
def test_fetched_segments_of_a_run_are_cleaned_too(
    selected: bool, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = write(run / "captured", [record(0), record(1)])
    half = fetched / "000000000000000001-000000000000.segment.partial"
    half.write_bytes(b"text of alice, of a pull that was killed")
    if not selected:
        shutil.rmtree(run / "data")
    assert delete_user("alice", run) == 0
    assert [one.tokens[0] for one in read_records([fetched], ReadStats())] == [0]
    assert f"{fetched}: 1 records deleted" in capsys.readouterr().out
    assert not half.exists()
    half.write_bytes(b"text of alice")
    monkeypatch.setattr("specdecode_worker.commands.capture.time.time", lambda: 1e11)
    assert main(["capture", "sweep", "--max-age", "100", str(run)]) == 0
    assert list(read_records([fetched], ReadStats())) == []
    assert not half.exists()


def test_expired_records_are_deleted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdecode_worker.commands.capture.time.time", lambda: 112.0)
    assert main(["capture", "sweep", "--max-age", "100", str(run)]) == 0
    assert left(run) == [12, 13]
    assert len(shard_paths(run / "data" / "train")) == 1, "an empty shard is deleted"


def test_sweep_of_a_run_asks_for_the_age(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "sweep", str(run)]) == 1
    assert "--max-age" in capsys.readouterr().err
    assert len(left(run)) == 8


def test_expired_text_is_not_replayed(run: Path) -> None:
    pool = read_pool([run], most_tokens=10**6, oldest_seconds=12.0)
    assert [int(one.tokens_N[0]) for one in pool.training] == [12, 13]


def test_interrupted_deletion_leaves_no_text_behind(run: Path) -> None:
    shard = shard_paths(run / "data" / "train")[0]
    write_shard(shard.parent, 0, list(read_shard(shard))[:2])  # as if stopped between shard and records
    assert delete_user("nobody-at-all", run) == 0
    assert left(run) == [10, 11, 12, 13]


def test_text_that_a_kill_left_half_written_or_half_deleted_goes_with_every_deletion(run: Path) -> None:
    train = run / "data" / "train"
    torn = [train / "shard-00000.safetensors.partial", train / "shard-00000.records.partial"]
    torn += [run / "data" / "selected.records.partial", train / "shard-00003.records"]
    for path in torn:
        path.write_bytes(b"text of alice")
    write_shard(train, 4, [conversation(record(40))])
    assert delete_user("nobody-at-all", run) == 0
    assert not [path for path in torn if path.exists()]
    assert left(run) == [0, 1, 2, 3, 10, 11, 12, 13]


def test_deletion_from_a_run_in_progress_starts_the_replay_again(run: Path) -> None:
    data = run / "data"
    (data / "summary.json").unlink()
    (data / "selected.json").write_text("{}")
    records = [record(i) for i in range(6)]
    (data / "selected.records").write_bytes(msgspec.msgpack.encode(records))
    (data / "done-00000.json").write_text("{}")
    assert delete_user("bob", run) == 0
    remaining = msgspec.msgpack.decode((data / "selected.records").read_bytes(), type=list[Record])
    assert [one.tokens[0] for one in remaining] == [1, 3, 5]
    assert left(run) == []
    assert not list(data.glob("done-*.json"))


def test_a_selection_that_was_killed_before_its_summary_is_cleaned_too(run: Path) -> None:
    data = run / "data"
    shutil.rmtree(data)
    data.mkdir()
    (data / "selected.records").write_bytes(msgspec.msgpack.encode([record(0), record(1)]))
    (data / "selected.json.partial").write_text("{")
    assert delete_user("alice", run) == 0
    assert [path.name for path in data.iterdir()] == ["selected.records"]
    remaining = msgspec.msgpack.decode((data / "selected.records").read_bytes(), type=list[Record])
    assert [one.tokens[0] for one in remaining] == [0]


def test_the_list_of_a_run_that_was_killed_after_its_summary_costs_no_shard(run: Path) -> None:
    selected = run / "data" / "selected.records"
    selected.write_bytes(msgspec.msgpack.encode([record(10 * index + i) for index in range(2) for i in range(4)]))
    assert delete_user("alice", run) == 0
    assert left(run) == [0, 2, 10, 12]
    assert not selected.exists()


def test_a_run_that_goes_on_deletes_the_segments_that_have_expired(run: Path) -> None:
    fetched = write(run / "captured", [record(0)])
    delete_expired_from_runs([run], 1.0, print)
    assert len(list(fetched.glob("*.segment"))) == 1
    delete_expired_from_runs([run], 1e11, print)
    assert not list(fetched.glob("*.segment"))


def test_a_run_does_not_go_on_with_another_target(tmp_path: Path) -> None:
    for _ in range(2):
        check_same_target(tmp_path, Ancestor("s3://models/m", tmp_path, "a" * 16))
    with pytest.raises(ResumeMismatch, match="another --out"):
        check_same_target(tmp_path, Ancestor("s3://models/m", tmp_path, "b" * 16))
