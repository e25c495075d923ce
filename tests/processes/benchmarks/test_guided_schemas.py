"""The chosen schemas of the benchmark of guided answers: the list, and what is read from a clone or an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TEXTS = {("easy", "a"): '{"type": "object"}', ("hard", "b"): '{"type":\n "string", "title": "\u00e9"}'}


@pytest.fixture
def guided_cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import guided_cases

    return guided_cases


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


def test_the_list_names_three_hundred_schemas_of_nine_classes(guided_cases: Any) -> None:
    lines = [line.split("\t") for line in guided_cases.CHOSEN.read_text().splitlines()]
    assert len(lines) == len({(kind, name) for kind, name, _ in lines}) == 300
    assert len({kind for kind, _, _ in lines}) == 9, "no schema of Github_ultra is short enough"
    assert {len(digest) for _, _, digest in lines} == {16}
