"""Shards of captured records for the three splits, selected, replayed and checked.

    OUT/data/{train,validation,test}/shard-*.safetensors   conversations with the target's states
    OUT/data/{train,validation,test}/shard-*.records       the records they were made from, in the shard's order
    OUT/data/done-*.json                                   results of the replay of one chunk of records
    OUT/data/summary.json                                  counts of used and dropped records, written at the end

A stopped run resumes with the first chunk that has no done file.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

import msgspec

from specdecode_worker.capture import ReadStats, Record, read_records
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.artifacts.atomic_files import write_text
from specdecode_worker.training.data.shards import SHARD_TOKENS, shard_paths
from specdecode_worker.training.distillation.record_replay import DropReason, Replayed, replay, static_drop_reason
from specdecode_worker.training.distillation.sample_shards import read_records_of, write_sample_shard
from specdecode_worker.training.distillation.splits import Runs, Split, Text, overlapping, runs_of, split_of
from specdecode_worker.training.evaluation.paired_steps import Sample

_LIMITS: Mapping[Split, float] = {"train": 1, "validation": 1 / 8, "test": 1 / 4}
_CHUNK = 32
"""Most records replayed between two polls of ``stopped`` and written together; fewer where they have SHARD_TOKENS."""

Stopped = Callable[[], bool]


class Interrupted(Exception):
    """Stop on request. All finished work is on disk, and the same command resumes from it."""


@dataclass(slots=True)
class Summary:
    """Counts of the used and dropped records of a capture.

    ``mix`` holds the domains' shares of the traffic's output tokens.
    """

    records: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    conversations: dict[str, dict[str, int]] = field(default_factory=dict)
    mix: dict[str, float] = field(default_factory=dict)
    output_tokens: int = 0
    near_ties: int = 0
    replayed_tokens: int = 0
    """Output tokens of all records that the target replayed."""
    not_reproduced_tokens: int = 0
    """Those of the records that the target does not reproduce."""
    window_seconds: tuple[float, float] = (0.0, 0.0)
    sha256: str = ""
    torn_segments: int = 0
    unreadable: int = 0

    @property
    def not_reproduced_share(self) -> float:
        """Share of the replayed text, in output tokens, that the target does not reproduce."""
        return self.not_reproduced_tokens / self.replayed_tokens if self.replayed_tokens else 0.0

    @property
    def invalid_share(self) -> float:
        """Share of the records that no worker writes: with an impossible share, time, token or sampling parameter."""
        invalid = self.dropped.get(DropReason.malformed, 0) + self.dropped.get(DropReason.in_future, 0)
        return invalid / self.records if self.records else 0.0


@dataclass(frozen=True, slots=True)
class CaptureSelection:
    """Folders of captured records and the conditions that records must meet. Times are Unix seconds.

    ``target`` is the hash of the target that must have served the records. ``positions`` is the longest text that the
    target can read, in tokens.
    """

    folders: tuple[Path, ...]
    target: str
    positions: int
    oldest_seconds: float = 0.0
    newest_seconds: float = math.inf
    """Time after which a record cannot have been served. A record from the future would supersede all others."""
    judged: Runs | None = None
    """Runs of tokens of the golden set, which no captured text may share."""
    most_tokens: int = 400_000
    """Most tokens of training text. The states of a token take four times the hidden size.

    Validation gets an eighth of this number, test a quarter.
    """


def prepare_shards(
    target: Llama, source: CaptureSelection, folder: Path, log: Callable[[str], None], stopped: Stopped
) -> Summary:
    """Select, replay and write the records of ``source`` to ``folder``, and return their summary.

    Raises:
        Interrupted: ``stopped`` returned True.
        FolderUnusable: A capture folder cannot be read.
    """
    path = folder / "summary.json"
    if path.exists():
        return msgspec.convert(json.loads(path.read_text()), Summary)
    folder.mkdir(parents=True, exist_ok=True)
    summary, records = _selected(source, folder, target.config.vocab_size)
    replayed = 0
    for number, chunk in enumerate(chunks_of(records)):
        replayed += len(chunk)
        if not (folder / f"done-{number:05}.json").exists():
            if stopped():
                raise Interrupted
            _replay_chunk(target, chunk, folder, number)
            log(f"distill: {replayed} of {len(records)} records replayed")
    _add_up(summary, folder)
    _write_json(path, asdict(summary))
    # The shards hold what was selected and reproduced. Another copy of the text would outlive their deletion.
    (folder / "selected.records").unlink(missing_ok=True)
    return summary


def chunks_of(records: Sequence[Record], most_tokens: int = SHARD_TOKENS) -> Iterator[list[Record]]:
    """Yield the records in chunks of at most ``_CHUNK`` records and about ``most_tokens`` tokens."""
    chunk: list[Record] = []
    tokens = 0
    for record in records:
        chunk.append(record)
        tokens += len(record.tokens)
        if len(chunk) == _CHUNK or tokens >= most_tokens:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def _selected(source: CaptureSelection, folder: Path, vocab_size: int) -> tuple[Summary, list[Record]]:
    """Return the selected records and their summary.

    The selection is stored in a file, so that a resumed run uses the same records while workers continue to capture.
    """
    records_path, summary_path = folder / "selected.records", folder / "selected.json"
    if not summary_path.exists():
        stats = ReadStats()
        summary, chosen = select_records(read_records(source.folders, stats), source, vocab_size)
        summary.torn_segments, summary.unreadable = stats.torn, stats.unreadable
        records_path.write_bytes(msgspec.msgpack.encode(chosen))
        _write_json(summary_path, asdict(summary))
    records = msgspec.msgpack.decode(records_path.read_bytes(), type=list[Record])
    return msgspec.convert(json.loads(summary_path.read_text()), Summary), records


def select_records(
    records: Iterable[Record], source: CaptureSelection, vocab_size: int
) -> tuple[Summary, list[Record]]:
    """Select the newest usable records such that no run of 13 tokens occurs in two splits.

    Return a summary that counts the dropped records by reason, and the selected records. Memory holds no more records
    than the token budgets allow, because a capture may be far larger than memory.
    """
    dropped: Counter[str] = Counter()
    newest = {split: _Newest(source.most_tokens * part) for split, part in _LIMITS.items()}
    count = 0
    for count, record in enumerate(records, start=1):
        unfit = static_drop_reason(record, source.target, vocab_size, source.positions) or _time_drop_reason(
            record, source
        )
        if unfit is None:
            newest[split_of(record.opening)].add(record, count)
        else:
            dropped[unfit] += 1
    fit = [record for _, _, record in sorted(one for split in newest.values() for one in split.heap)]
    dropped[DropReason.superseded] = count - dropped.total() - len(fit)
    overlap = overlapping([_text(one) for one in fit], [split_of(one.opening) for one in fit], source.judged)
    dropped[DropReason.overlaps] = sum(overlap)
    chosen = [record for record, drop in zip(fit, overlap, strict=True) if not drop]
    return _summary(count, dropped, chosen), chosen


def _time_drop_reason(record: Record, source: CaptureSelection) -> DropReason | None:
    if record.time_seconds < source.oldest_seconds:
        return DropReason.too_old
    return DropReason.in_future if record.time_seconds > source.newest_seconds else None


def _summary(count: int, dropped: Counter[str], chosen: Sequence[Record]) -> Summary:
    """Return the summary of a selection. Its hash does not depend on the reading order of the records."""
    times = [record.time_seconds for record in chosen] or [0.0]
    digest = hashlib.sha256()
    for record in sorted(chosen, key=lambda one: (one.time_seconds, one.opening, one.tokens)):
        digest.update(msgspec.msgpack.encode(record))
    return Summary(
        records=count, dropped={k: n for k, n in dropped.items() if n},
        window_seconds=(min(times), max(times)), sha256=digest.hexdigest(),
    )  # fmt: skip


class _Newest:
    """The newest records up to ``most_tokens`` tokens. Entries of ``heap`` are (time, reading order, record)."""

    def __init__(self, most_tokens: float) -> None:
        self._most_tokens, self._tokens = most_tokens, 0
        self.heap: list[tuple[float, int, Record]] = []

    def add(self, record: Record, number: int) -> None:
        """Add a record and remove the oldest ones that exceed the token budget."""
        heapq.heappush(self.heap, (record.time_seconds, number, record))
        self._tokens += len(record.tokens)
        while self._tokens - len(self.heap[0][2].tokens) >= self._most_tokens:
            self._tokens -= len(heapq.heappop(self.heap)[2].tokens)


def _text(record: Record) -> Text:
    prompt, answer = record.tokens[: record.prompt_length], record.tokens[record.prompt_length :]
    return Text(record.opening, record.task, prompt, runs_of(answer))


def _replay_chunk(target: Llama, chunk: Sequence[Record], folder: Path, number: int) -> None:
    """Replay a chunk and write its shards, then its done file.

    A chunk without a done file is replayed again and overwrites its shards.
    """
    parts: dict[Split, list[Sample]] = {split: [] for split in get_args(Split)}
    dropped: Counter[str] = Counter()
    ties, tokens = 0, Counter[str]()
    for record in chunk:
        replayed = replay(target, record)
        tokens["replayed"] += record.output_length
        if isinstance(replayed, Replayed):
            parts[split_of(record.opening)].append(Sample(record, replayed.conversation))
            ties += replayed.ties
        else:
            dropped[replayed] += 1
            tokens["not_reproduced"] += record.output_length
    for split, samples in parts.items():
        if samples:
            (folder / split).mkdir(exist_ok=True)
            write_sample_shard(folder / split, number, samples)
    _write_json(folder / f"done-{number:05}.json", {"dropped": dropped, "near_ties": ties, "tokens": tokens})


def _add_up(summary: Summary, folder: Path) -> None:
    """Complete ``summary`` with the counts of all chunks."""
    dropped = Counter(summary.dropped)
    for path in sorted(folder.glob("done-*.json")):
        note = json.loads(path.read_text())
        dropped.update(note["dropped"])
        summary.near_ties += note["near_ties"]
        summary.replayed_tokens += note["tokens"].get("replayed", 0)
        summary.not_reproduced_tokens += note["tokens"].get("not_reproduced", 0)
    summary.dropped = dict(dropped)
    tokens: Counter[str] = Counter()
    weighted: Counter[str] = Counter()
    for split in get_args(Split):
        records = list(_records(folder / split))
        summary.used[split] = len(records)
        openings = {(record.task, record.opening) for record in records}
        summary.conversations[split] = dict(Counter(task for task, _ in sorted(openings)))
        for record in records:
            tokens[record.task] += record.output_length
            weighted[record.task] += record.output_length / record.share  # type: ignore[assignment]
    summary.output_tokens = tokens.total()
    summary.mix = {task: weight / weighted.total() for task, weight in sorted(weighted.items())}


def _records(folder: Path) -> Iterator[Record]:
    for path in shard_paths(folder):
        yield from read_records_of(path)


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    write_text(path, json.dumps(document, indent=2) + "\n")
