"""Traffic that shifts: questions at first, tables later, asked of a real server that captures; for distillation.py."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from specdecode_worker.capture import opening_hash
from specdecode_worker.contract import Env, Plan, TaskMatch, TreeShape
from specdecode_worker.training import prompts
from specdecode_worker.training.distillation.records import split_of

OLD, NEW = "qa", "csv"
GOLDEN_DOMAINS = ("qa", "code")
_AT_ONCE = 24
_NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Mona")
_CITIES = ("Paris", "Oslo", "Rome", "Lima", "Cairo", "Delhi", "Quito", "Berlin", "Tokyo", "Accra", "Perth", "Miami")
_COLUMNS = ("amount", "price", "balance", "weight", "score")


@dataclass(frozen=True, slots=True)
class Asked:
    task: str
    text: str
    temperature: float
    seed: int


def golden_lines(count: int) -> list[dict[str, Any]]:
    """``count`` prompts of each golden domain, the same whenever they are made."""
    rng, found = random.Random("golden"), {domain: set[str]() for domain in GOLDEN_DOMAINS}
    while any(len(texts) < count for texts in found.values()):
        drawn = prompts.draw(rng)
        if drawn.domain in found and len(found[drawn.domain]) < count:
            found[drawn.domain].add(drawn.text)
    return [
        {"messages": [{"role": "user", "content": text}], "domain": domain}
        for domain, texts in found.items()
        for text in sorted(texts)
    ]


def drawn(task: str, counts: dict[str, int], taken: set[str]) -> list[Asked]:
    """Requests of which so many fall into each split: a split is a hash, so choosing by it is no choice of text."""
    rng, left, found = random.Random(task), Counter(counts), list[Asked]()
    while left.total() > 0:
        text = _table(rng) if task == NEW else _question(rng)
        split = split_of(opening_hash(text))
        if text not in taken and left[split] > 0:
            taken.add(text)
            left[split] -= 1
            found.append(Asked(task, text, 0.8 if len(found) % 2 else 0.0, len(found)))
    return found


def _question(rng: random.Random) -> str:
    while (made := prompts.draw(rng)).domain != OLD:
        pass
    return made.text


def _table(rng: random.Random) -> str:
    rows = [
        f"{rng.randint(100, 999)},{rng.choice(_NAMES)},{rng.choice(_CITIES)},{rng.randint(1000, 9999) / 100:.2f}"
        for _ in range(3)
    ]
    return "\n".join([f"id,name,city,{rng.choice(_COLUMNS)}", *rows, ""])


def served(capture: Path, phases: Sequence[Sequence[Asked]], tokens: int) -> None:
    """Asks a server with ``--capture``, one phase after the other, and has it leave as Kubernetes would."""
    plan = capture.with_suffix(".plan.json")
    tasks = tuple(TaskMatch(name=name) for name in (OLD, NEW))
    plan.write_text(Plan(initial=TreeShape.chain(3), max_depth=3, tasks=tasks).model_dump_json())
    for url in _server(capture, plan):
        for phase in phases:
            with ThreadPoolExecutor(_AT_ONCE) as pool, httpx.Client(base_url=url, timeout=1800) as client:
                list(pool.map(lambda asked, client=client: _ask(client, asked, tokens), phase))


def _ask(client: httpx.Client, asked: Asked, tokens: int) -> None:
    body: dict[str, Any] = {
        "model": "m", "max_tokens": tokens, "temperature": asked.temperature, "seed": asked.seed,
        "metadata": {"task": asked.task},
    }  # fmt: skip
    if asked.task == NEW:
        answer = client.post("/v1/completions", json=body | {"prompt": asked.text})
    else:
        messages = [{"role": "user", "content": asked.text}]
        answer = client.post("/v1/chat/completions", json=body | {"messages": messages})
    answer.raise_for_status()


def _server(capture: Path, plan: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "specdecode_worker", "serve", "--port", "0", "--admin-port", "0"]
    words += ["--served-model-name", "m", "--threads", "1", "--max-num-seqs", str(_AT_ONCE), "--capture", str(capture)]
    log = capture.with_suffix(".log")
    with log.open("w") as out:
        server = subprocess.Popen(words, stderr=out, env={**os.environ, Env.plan_path: str(plan)})
    try:
        while " ready: " not in log.read_text():
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
        yield log.read_text().partition("public port: ")[2].split()[0]
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0, log.read_text()
    finally:
        server.kill()


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
