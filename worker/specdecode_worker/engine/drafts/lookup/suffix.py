"""Drafter of the method suffix: suffix decoding (Oliaro et al., arXiv 2411.04975; method "suffix" of vLLM).

Prompt lookup sees the text of one request. Suffix decoding also sees earlier answers of the same tenant, and prefers
the most frequent continuation of the longest match, as agents and editors repeat themselves. The children of a tree
node are the continuations of the occurrences that agree with the path to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.drafts.aux_hidden_states import StateColumns
from specdecode_worker.engine.drafts.drafter import Expand
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.suffix_index import Occurrence, following, rank
from specdecode_worker.speculation.suffix_store import RequestText, SuffixStore
from specdecode_worker.speculation.trees import Forest, Level


class SuffixDrafter:
    """Drafter of the method suffix. It has no weights, and its answers are stored in host memory, within bounds."""

    needs_passes: ClassVar[bool] = False

    def __init__(self, state: DeviceState, store: SuffixStore, *, host_is_current: bool) -> None:
        """Create a drafter.

        Args:
            state: Device state of the running requests.
            store: Earlier answers.
            host_is_current: True if the host knows every token before the next step, that is, no step is launched
                ahead. A request without a match then decodes plainly.
        """
        self.reads, self.columns = TargetStates(), StateColumns()
        self._state, self._store = state, store
        self._host_is_current = host_is_current
        self._texts: dict[str, RequestText] = {}

    def ready(self, request: Request) -> bool:
        """Return whether the end of the text occurred before. Always True if the host is behind."""
        if not self._host_is_current:
            return True
        text = self._text(request)
        text.extend(request.tokens[text.length :])
        return bool(text.matches())

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Index the chunks, so that a long prompt is not indexed in one step."""
        for row in rows:
            text = self._text(row.request)
            text.extend(row.request.tokens[text.length : row.start + row.count])

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Expand | None:
        """Return the function that proposes tokens after earlier occurrences of the ends of the texts."""
        if not forest.levels:
            return None
        drafting = [b for b, tree in enumerate(forest.trees) if tree.expanded]
        self._read_texts([rows[b].request for b in drafting])
        occurrences: dict[tuple[int, int], list[Occurrence]] = {
            (b, 0): self._text(rows[b].request).matches() for b in drafting
        }
        slots_B = to_device([row.request.slot for row in rows], self._state.length_S.device)

        def expand(depth: int, level: Level) -> Tensor:
            nodes = list(zip(level.batch_R.tolist(), level.node_R.tolist(), strict=True))
            if depth:
                slots_R = slots_B[level.batch_R]
                tokens_R = self._state.tokens_SP[slots_R, self._state.length_S[slots_R] + level.node_R]
                for (b, node), token in zip(nodes, tokens_R.tolist(), strict=True):
                    before = occurrences[b, forest.trees[b].parents[node]]
                    occurrences[b, node] = following(before, token) if before else []
            ranked = [rank(occurrences[node])[:MAX_RANKS] for node in nodes]
            padded = [tokens + [-1] * (MAX_RANKS - len(tokens)) for tokens in ranked]
            return to_device(padded, self._state.length_S.device)

        return expand

    def record_end(self, request: Request) -> None:
        """Store the answer of a request that ends."""
        self._texts.pop(request.id, None)
        answer = request.tokens[len(request.submit.prompt) :]
        if answer:
            self._store.add(request.submit.cache_salt, answer)

    def _text(self, request: Request) -> RequestText:
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = RequestText(self._store, request.submit.cache_salt)
        return text

    def _read_texts(self, requests: Sequence[Request]) -> None:
        """Append the tokens that the device has and the index lacks. On an accelerator this waits for the last step."""
        if not requests:
            return
        slots_B = to_device([request.slot for request in requests], self._state.length_S.device)
        for request, length in zip(requests, self._state.length_S[slots_B].tolist(), strict=True):
            text = self._text(request)
            if text.length <= length:
                text.extend(self._state.tokens_SP[request.slot, text.length : length + 1].tolist())
