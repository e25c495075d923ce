"""The table of drafts by depth and load: cells of a tiny run on the real engine, and what the report makes of cells."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training.artifacts import write_draft
from specdecode_worker.training.heads import new_dflash

ROOT = Path(__file__).parents[3]


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a program of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    draft_depths = program("draft_depths", monkeypatch)

    def call(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["draft_depths.py", *words])
        draft_depths.main()

    return call


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.embedded
@pytest.mark.timeout(900)
def test_a_run_continues_where_it_stopped(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = resolve(EMBEDDED_TARGET, default_cache_dir()), tmp_path / "depths.jsonl"
    target = load_causal_lm(folder, dtype=torch.float32, device=torch.device("cpu"), max_model_len=512)
    write_draft(new_dflash(target, 1, 2), tmp_path / "head", folder)
    words = ["--head", f"shipped:eagle3={EMBEDDED_DRAFT}", "--head", f"dflash=file://{tmp_path}/head"]
    words += ["--dtype", "float32", "--every", "35", "--max-tokens", "5", "--depths", "2", "--loads", "1", "2"]
    words += ["--out", str(out)]
    run(*words)
    settings, *cells = lines(out)
    keys = [(cell["method"], cell["depth"], cell["load"]) for cell in cells]
    assert keys == [(m, d, n) for n in (1, 2) for m, d in (("plain", 0), ("shipped", 2), ("dflash", 2))]
    assert [cell["same_text"] for cell in cells] == [2] * 6
    assert settings["settings"]["trained_tokens"]["dflash"] is None
    by_key = dict(zip(keys, cells, strict=True))
    for n in (1, 2):
        assert by_key["plain", 0, n]["tokens_per_step"] == 1.0
        assert by_key["shipped", 2, n]["tokens_per_step"] > 1.0
        assert by_key["shipped", 2, n]["milliseconds_per_token"] > 0
    first_run = out.read_text().splitlines()
    out.write_text("\n".join(first_run[:-1]) + "\n")
    run(*words)
    again = lines(out)
    assert [line.keys() for line in again] == [json.loads(line).keys() for line in first_run]
    assert out.read_text().splitlines()[:-1] == first_run[:-1]
    with pytest.raises(SystemExit, match="is of another run"):
        run(*words, "--max-tokens", "6")
    capsys.readouterr()
    run("--report", str(out), "--plot", str(tmp_path / "plot.png"))
    assert "Cells with the texts of plain decoding: 6 of 6" in capsys.readouterr().out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def host_cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the measurement of host time, with small sizes."""
    module = program("host_cost", monkeypatch)
    small = {"PROMPT_TOKENS": 20, "WARM_STEPS": 4, "STEPS": 4, "POOL_BLOCKS": 2000, "OWNERS": 4, "TURNOVERS": 2}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize(("shape", "tokens"), [("none", 1), ("chain:3", 4)])
def test_every_step_emits_all_tokens_of_its_trees(host_cost: Any, shape: str, tokens: int) -> None:
    engine = host_cost.running(shape, 2)
    for _ in range(3):
        assert [len(new.tokens) for new in engine.step()] == [tokens, tokens]
    assert host_cost.measure(shape, 2) > 0


def test_the_blocks_of_a_chunk_come_from_a_warm_cache(host_cost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdecode_worker.core.kv_cache import BlockPool

    evicted: list[int] = []
    evict = BlockPool.evict
    monkeypatch.setattr(BlockPool, "evict", lambda self, block: (evicted.append(block), evict(self, block)))
    assert host_cost.measure_allocation() > 0
    chunk = host_cost.CHUNK_TOKENS // 16
    assert len(evicted) > host_cost.POOL_BLOCKS - (host_cost.OWNERS + 2) * chunk, "the second turn evicts"


TEXTS = {("easy", "a"): '{"type": "object"}', ("hard", "b"): '{"type":\n "string", "title": "\u00e9"}'}


@pytest.fixture
def guided_cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the benchmark of guided answers, whose chosen schemas are read from a clone or an archive."""
    return program("guided_cases", monkeypatch)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder like that of the benchmark, with one schema more than is chosen."""
    for (kind, name), text in {**TEXTS, ("hard", "c"): "{}"}.items():
        path = tmp_path / "data" / kind / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "data"


@pytest.fixture
def chosen(guided_cases: Any, clone: Path, tmp_path: Path) -> Path:
    cases = [guided_cases.Case(name, kind, {}, (), "") for kind, name in TEXTS]
    guided_cases.write_choice(cases, clone, tmp_path / "chosen.tsv")
    return tmp_path / "chosen.tsv"


def test_an_archive_holds_the_chosen_schemas_of_a_clone(
    guided_cases: Any, clone: Path, chosen: Path, tmp_path: Path
) -> None:
    lines = chosen.read_text().splitlines()
    wanted = {key: text.encode() for key, text in TEXTS.items()}
    assert guided_cases._texts(clone, lines) == wanted
    guided_cases.write_archive(clone, tmp_path / "schemas.xz", chosen)
    assert guided_cases._texts(tmp_path / "schemas.xz", lines) == wanted
    assert list(guided_cases._texts(clone, lines[:1])) == [("easy", "a")]


def test_another_schema_is_refused(guided_cases: Any, clone: Path, chosen: Path) -> None:
    (clone / "hard" / "b.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"hard/b in .* is not the schema that was chosen"):
        guided_cases._texts(clone, chosen.read_text().splitlines())
    (clone / "easy" / "a.json").unlink()
    with pytest.raises(SystemExit, match="has no easy/a"):
        guided_cases._texts(clone, chosen.read_text().splitlines())
