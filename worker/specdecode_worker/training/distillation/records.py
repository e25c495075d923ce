"""Captured records as training shards: their splits, samples and states."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from specdecode_worker.capture import ReadStats, Record, read_records
from specdecode_worker.files import write_bytes, write_json
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.training.conversations import SHARD_TOKENS, read_shard, shard_paths, write_shard
from specdecode_worker.training.evaluation import Sample
from specdecode_worker.training.replay import DropReason, Replayed, replay, static_drop_reason

# Train, validation and test splits of captured conversations, without overlap; pure functions over token ids.
#
# The split of a conversation is a hash of its opening user text, so it is the same in every generation of a draft and
# on every machine. Texts with different openings may still share passages. A text that shares a run of 13 tokens with a
# text of a split used for evaluation is dropped.

Split = Literal["train", "validation", "test"]
SHARES: tuple[tuple[Split, float], ...] = (("test", 0.1), ("validation", 0.1), ("train", 0.8))
"""Shares of the splits, in order of precedence.

They must never change: drafts in use were trained on the training texts that these shares define.
"""
NGRAM_TOKENS = 13
_COMMON = (3, 0.05)
"""Limits (count, share) of conversations of a task: a run in the prompts of more than both belongs to the task's frame.
"""

Runs = NDArray[np.uint64]
"""Hashes of runs of tokens, sorted and unique."""


def split_of(opening: str) -> Split:
    """Return the split of a conversation by the hash of its opening (``capture.opening_hash``)."""
    # The opening is hashed again, so that the split is independent of any other decision made by its digits.
    drawn = int.from_bytes(hashlib.sha256(f"split/{opening}".encode()).digest()[:8]) / 2**64
    for split, share in SHARES:
        drawn -= share
        if drawn < 0:
            return split
    return SHARES[-1][0]


def runs_of(tokens: Sequence[int], size: int = NGRAM_TOKENS) -> Runs:
    """Return the hashes of all runs of ``size`` tokens. A shorter text counts as one run."""
    return np.unique(_windows(tokens, min(size, len(tokens))))


def _windows(tokens: Sequence[int], size: int) -> Runs:
    """Return the hash of the run of ``size`` tokens that begins at each token, in order."""
    if not 0 < size <= len(tokens):
        return np.empty(0, np.uint64)
    ids = _mixed(np.asarray(tokens, np.uint64) + np.uint64(1))
    hashes = np.zeros(len(ids) - size + 1, np.uint64)
    for i in range(size):
        # A polynomial modulo 2^64 over mixed ids. A collision only drops a text without need.
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[i : len(ids) - size + 1 + i]
    return hashes


def _mixed(x: Runs) -> Runs:
    """Return ``x`` mixed by SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Text:
    """Record as the overlap check needs it: the prompt's tokens, the answer's runs, its conversation and domain."""

    conversation: str
    domain: str
    prompt: Sequence[int]
    answer: Runs


def frames(texts: Iterable[Text]) -> dict[str, Runs]:
    """Return by domain the runs around the user text: chat template, system prompt, a task's instructions."""
    conversations: dict[str, dict[str, list[Runs]]] = defaultdict(lambda: defaultdict(list))
    for text in texts:
        conversations[text.domain][text.conversation].append(np.unique(_windows(text.prompt, NGRAM_TOKENS)))
    runs_by_domain = {}
    for domain, prompts in conversations.items():
        own = [np.unique(np.concatenate(parts)) for parts in prompts.values()]
        runs, counts = np.unique(np.concatenate(own), return_counts=True)
        runs_by_domain[domain] = runs[counts > max(_COMMON[0], _COMMON[1] * len(prompts))]
    return runs_by_domain


def exclusive_runs(text: Text, frame: Mapping[str, Runs]) -> Runs:
    """Return the runs of a text that must occur in one split only.

    They are the runs of the answer, the prompt as a whole, and the runs of the prompt's parts outside its frame. Runs
    that are partly frame are left out: they would match two different questions that only begin with the same words.
    """
    windows = _windows(text.prompt, NGRAM_TOKENS)
    framed_N = np.zeros(len(text.prompt), bool)
    for at in np.flatnonzero(np.isin(windows, frame.get(text.domain, windows[:0]))):
        framed_N[at : at + NGRAM_TOKENS] = True
    left = [[text.prompt[i] for i in piece] for piece in _stretches(np.flatnonzero(~framed_N))]
    parts = [runs_of(piece) for piece in left if len(piece) >= NGRAM_TOKENS]
    return union_of_runs([text.answer, runs_of(text.prompt, len(text.prompt)), *parts])


def _stretches(places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return ``places`` divided into stretches of consecutive positions."""
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []


def overlapping(texts: Sequence[Text], splits: Sequence[Split], judged: Runs | None = None) -> list[bool]:
    """Return for each text whether to drop it, so that no run of tokens occurs in two splits.

    Test texts are dropped only for ``judged``, the runs of the golden set. Validation texts are also dropped for test
    texts, training texts for both.
    """
    frame = frames(texts)
    own = [exclusive_runs(text, frame) for text in texts]
    taken = np.empty(0, np.uint64) if judged is None else judged
    dropped = [False] * len(texts)
    for split, _ in SHARES:
        here = [i for i, other in enumerate(splits) if other == split]
        for i in here:
            dropped[i] = shares_run(own[i], taken)
        taken = union_of_runs([taken, *(own[i] for i in here if not dropped[i])])
    return dropped


def union_of_runs(parts: Sequence[Runs]) -> Runs:
    """Return the union of ``parts``."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


def shares_run(mine: Runs, theirs: Runs) -> bool:
    """Return whether the two sets of runs have one in common."""
    if not len(theirs) or not len(mine):
        return False
    at = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
    return bool((theirs[at] == mine).any())


# Shards of samples: conversations with the target's states, each with a file of the records they were made from.


def write_samples(folder: Path, samples: Iterable[Sample], shard_tokens: int = SHARD_TOKENS) -> None:
    """Write samples to the shards of a new ``folder`` as they come. A killed write leaves no ``folder``."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    waiting: list[Sample] = []
    number = 0
    for sample in samples:
        waiting.append(sample)
        if sum(len(one.record.tokens) for one in waiting) >= shard_tokens:
            write_sample_shard(partial, number, waiting)
            waiting, number = [], number + 1
    if waiting:
        write_sample_shard(partial, number, waiting)
    shutil.rmtree(folder, ignore_errors=True)  # it may be there without a shard
    partial.rename(folder)


def write_sample_shard(folder: Path, number: int, samples: Sequence[Sample]) -> None:
    """Write a shard, then the records that it was made from."""
    path = write_shard(folder, number, [sample.conversation for sample in samples])
    write_bytes(path.with_suffix(".records"), msgspec.msgpack.encode([sample.record for sample in samples]))


def read_records_of(shard: Path) -> list[Record]:
    """Return the records that a shard was made from, in the shard's order."""
    return msgspec.msgpack.decode(shard.with_suffix(".records").read_bytes(), type=list[Record])


def read_samples(folder: Path) -> Iterator[Sample]:
    """Yield the samples of the split in ``folder``."""
    for path in shard_paths(folder):
        records = read_records_of(path)
        yield from (Sample(record, c) for record, c in zip(records, read_shard(path), strict=True))


# Shards of captured records for the three splits, selected, replayed and checked.
#
#     OUT/data/{train,validation,test}/shard-*.safetensors   conversations with the target's states
#     OUT/data/{train,validation,test}/shard-*.records       the records they were made from, in the shard's order
#     OUT/data/done-*.json                                   results of the replay of one chunk of records
#     OUT/data/summary.json                                  counts of used and dropped records, written at the end
#
# A stopped run resumes with the first chunk that has no done file.

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
    target: CausalLM, source: CaptureSelection, folder: Path, log: Callable[[str], None], stopped: Stopped
) -> Summary:
    """Select, replay and write the records of ``source`` to ``folder``, and return their summary.

    Raises:
        Interrupted: ``stopped`` returned True.
        FolderUnusable: A capture folder cannot be read.
    """
    path = folder / "summary.json"
    if not path.exists():
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
        write_json(path, asdict(summary))
    delete_replayed_selection(folder)
    return msgspec.convert(json.loads(path.read_text()), Summary)


def delete_replayed_selection(folder: Path) -> None:
    """Delete the list of selected records once all of it is replayed, which a kill may have kept from being done.

    The shards hold what was selected and reproduced. Another copy of the text would outlive their deletion.
    """
    if (folder / "summary.json").exists():
        (folder / "selected.records").unlink(missing_ok=True)


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
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(records_path, msgspec.msgpack.encode(chosen))
        write_json(summary_path, asdict(summary))
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


def _replay_chunk(target: CausalLM, chunk: Sequence[Record], folder: Path, number: int) -> None:
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
    write_json(folder / f"done-{number:05}.json", {"dropped": dropped, "near_ties": ties, "tokens": tokens})


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
