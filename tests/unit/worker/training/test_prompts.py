"""Training prompts are numerous and distinct and never overlap with the held-out prompts."""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from specdecode_worker.training import prompts
from specdecode_worker.training.errors import PromptFileError
from specdecode_worker.training.prompts import PromptLine, TrainingQuestions, draw, ngrams, overlaps, read_prompts
from support.training_fixtures import Letters

pytestmark = pytest.mark.slow

HELD_OUT = Path(__file__).parents[4] / "benchmarks" / "prompts" / "heldout.jsonl"


def test_held_out_prompts_cover_all_domains() -> None:
    domains = Counter(line.domain for line in read_prompts(HELD_OUT))
    assert all(domains[name] >= 16 for name in ("code", "qa", "prose"))
    assert {"math", "summary"} <= set(domains)


def test_no_training_prompt_overlaps_a_held_out_one() -> None:
    held_out = [ngrams(line.text) for line in read_prompts(HELD_OUT)]
    rng = random.Random(0)
    assert not any(overlaps(draw(rng).text, held_out) for _ in range(20_000))


def test_overlapping_text_is_detected() -> None:
    line = read_prompts(HELD_OUT)[0]
    held_out = [ngrams(line.text)]
    assert overlaps(f"Please do this: {line.text.upper()}", held_out)
    assert overlaps("what is  YOGA", [ngrams("What is yoga?")])
    assert not overlaps("What is yoga for?", [ngrams("What is yoga?")])


def test_drawn_prompts_are_diverse() -> None:
    rng = random.Random(1)
    drawn = [draw(rng) for _ in range(3000)]
    assert len({prompt.text for prompt in drawn}) > 2500
    # JSON and quoted code contain braces. Only an unfilled placeholder is a known word alone in braces.
    built_in = ("passage", "snippet", "symbol", "story", "table", "column", "field2", "entity2")
    unfilled = re.compile(r"\{(" + "|".join((*prompts._lists()["words"], *built_in)) + r")\}")
    assert not any(unfilled.search(prompt.text) for prompt in drawn)
    assert {prompt.domain for prompt in drawn} >= {"code", "sql", "json", "tools", "technical", "summary", "chat"}
    shares = Counter(prompt.domain for prompt in drawn)
    assert all(shares[name] > 0.1 * len(drawn) for name in ("code", "qa", "prose"))


def test_passages_quote_the_standard_library() -> None:
    assert len(prompts.passages()) > 200
    assert all(30 <= len(text.split()) <= 90 and "\n" not in text for text in prompts.passages())
    assert "json.dumps" in prompts.symbols()
    assert len(prompts.snippets()) > 500
    for snippet in prompts.snippets()[:50]:
        assert isinstance(ast.parse(snippet).body[0], ast.FunctionDef)
        assert ast.get_docstring(ast.parse(snippet).body[0]) is None


def test_prompt_file_replaces_built_in_prompts_and_held_out_ones_are_not_used() -> None:
    own = [PromptLine(prompt="abc"), PromptLine(prompt="xyz", domain="mine")]
    questions = TrainingQuestions(Letters(), [own[0]], 0, own)  # type: ignore[arg-type]
    assert {(q.ids, q.domain) for q in islice(iter(questions), 50)} == {((120, 121, 122), "mine")}


def test_prompts_that_are_all_held_out_are_reported() -> None:
    own = [PromptLine(prompt="abc")]
    with pytest.raises(PromptFileError, match="held-out"):
        next(iter(TrainingQuestions(Letters(), own, 0, own)))  # type: ignore[arg-type]


def test_prompt_file_in_another_encoding_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "Zürich"}'.encode("latin-1"))
    with pytest.raises(PromptFileError, match="utf-8"):
        read_prompts(path)


def test_a_prompt_may_contain_line_separators_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "one\u2028two\x85three"}, ensure_ascii=False) + "\n", "utf-8")
    assert [line.text for line in read_prompts(path)] == ["one\u2028two\x85three"]


BOTH = '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}'


@pytest.mark.parametrize("line", ["{", BOTH, "{}", '{"prompt": ""}'])
def test_invalid_prompt_line_is_reported_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(PromptFileError, match="line 2"):
        read_prompts(path)
