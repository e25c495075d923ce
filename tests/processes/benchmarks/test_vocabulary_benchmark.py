"""The table of drafts with another vocabulary: which tokens a draft lacks, and the rows of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def foreign_vocabulary(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import foreign_vocabulary

    return foreign_vocabulary


def test_share_of_tokens_that_a_draft_lacks(foreign_vocabulary: Any) -> None:
    shares = {}
    for vocabulary in foreign_vocabulary.VOCABULARIES:
        lacks = vocabulary.lacks()
        assert not any(lacks(index, "t") for index in range(foreign_vocabulary.KEPT + 1))
        shares[vocabulary.name] = sum(lacks(index, "t") for index in range(1001, 11001)) / 10_000
    assert list(shares.values()) == [0, 0, 0.1, 0.2, 0.5]


def test_report_has_a_row_for_each_vocabulary(foreign_vocabulary: Any, tmp_path: Path) -> None:
    def cell(vocabulary: str, shape: str, tokens: float, same: int, coverage: float) -> dict[str, Any]:
        columns = {"vocabulary": vocabulary, "shape": shape, "temperature": 0.8, "tokens_per_step": tokens}
        return columns | {"bound": 0.1, "same_text": same, "prompts": 5, "coverage": coverage}

    cells = [cell("own", "chain:3", 2.5, 5, 1.0), cell("own", "tree:2,1", 2.75, 5, 1.0)]
    cells += [cell("other", "chain:3", 1.5, 4, 0.8)]
    (tmp_path / "out.jsonl").write_text("\n".join(json.dumps(each) for each in cells))
    assert foreign_vocabulary.report(tmp_path / "out.jsonl").splitlines() == [
        "| draft's vocabulary | coverage | chain:3 at 0.8 | tree:2,1 at 0.8 | texts of plain decoding |",
        "| --- | --- | --- | --- | --- |",
        "| own | 100 % | 2.50 ± 0.10 | 2.75 ± 0.10 | 10 of 10 |",
        "| other | 80 % | 1.50 ± 0.10 |  | 4 of 5 |",
    ]
