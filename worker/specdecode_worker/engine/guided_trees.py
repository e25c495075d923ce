"""Draft trees of guided requests: chains of tokens that the grammar forces, which need no draft pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdecode_worker.core.batch import Selection
from specdecode_worker.core.request import Request
from specdecode_worker.sampling.trees import Tree, given_chain


def with_forced_tokens(selection: Selection, requests: Sequence[Request]) -> Selection:
    """Return ``selection`` with a chain of forced tokens for each guided request that has enough of them.

    A chain replaces a drafted tree that is not deeper: the same tokens then cost no draft pass. A deeper tree stays,
    since its draft proposes forced tokens too. A step with such a chain is no evidence about the planned shape.
    """
    trees = [_tree(tree, request) for tree, request in zip(selection.trees, requests, strict=True)]
    if not any(tree.given for tree in trees):
        return selection
    return Selection(trees, replace(selection.choice, shape=None, shadow_passes=0))


def given_tokens(request: Request, tree: Tree) -> tuple[int, ...]:
    """Return the tokens of a tree with given tokens; empty for any other tree."""
    if not tree.given or request.guide is None:
        return ()
    return request.guide.forced()[: tree.verified - 1]


def _tree(tree: Tree, request: Request) -> Tree:
    guide = request.guide
    if guide is None or not request.submit.sampling.max_tokens - request.emitted > 1:
        return tree
    room = request.submit.sampling.max_tokens - request.emitted - 1
    forced = len(guide.forced()[:room])
    return given_chain(forced) if forced and forced >= tree.depth else tree
