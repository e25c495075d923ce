"""Variants that ``bench`` compares."""

from __future__ import annotations

import argparse

import pytest

from specdecode_worker.commands.arguments import new_parser
from specdecode_worker.contract import TreeShape


def variants(*words: str) -> list[tuple[TreeShape, str, list[tuple[str, int]], str]]:
    parser = new_parser("bench")
    parser.exit_on_error = False
    args = parser.parse_args([part for word in words for part in ("--variant", word)])
    return [(one.shape, one.draft, [(m.draft, m.depth) for m in one.merge], str(one)) for one in args.variant]


def test_a_variant_names_its_draft_or_what_is_merged() -> None:
    chain = TreeShape.chain(3)
    assert variants("chain:3", "ngram/chain:3", "+ngram/chain:3", "+ngram:8/chain:3") == [
        (chain, "", [], "chain:3"),
        (chain, "ngram", [], "ngram/chain:3"),
        (chain, "", [("ngram", 0)], "+ngram/chain:3"),
        (chain, "", [("ngram", 8)], "+ngram:8/chain:3"),
    ]


@pytest.mark.parametrize("word", ["suffix/chain:3", "ngram:8/chain:3", "+ngram:x/chain:3", "+ngram", "+/chain:1"])
def test_other_variants_are_refused(word: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        variants(word)
