"""Separation of a model's thinking, which it writes between ``<think>`` and ``</think>``, from its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdecode_worker.contract import ReasoningFormat
from specdecode_worker.server.tokenizer import Tokenizer

_OPEN, _CLOSE = "<think>", "</think>"
_TAIL_TOKENS = 16
"""Tokens at the end of a prompt that hold a tag which the chat template has rendered, and white space behind it."""


class ReasoningParser:
    """Streaming parser of one choice. Its concatenated output does not depend on how the text was split into pieces."""

    def __init__(self, *, inside: bool) -> None:
        """Start before the text; ``inside`` if it begins with thinking, also without the opening tag."""
        self._held = ""
        self._inside, self._at_start, self._over = inside, True, False

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Add text, and return the thinking and the answer that are certain; ``last`` ends the text."""
        if self._over:
            return "", text
        self._held += text
        if self._at_start:
            begin = self._held.lstrip()
            if not last and _OPEN.startswith(begin[: len(_OPEN)]) and len(begin) < len(_OPEN):
                return "", ""
            self._at_start = False
            if begin.startswith(_OPEN):
                self._held, self._inside = begin.removeprefix(_OPEN), True
        if not self._inside:
            return "", self._rest()
        thought, tag, answer = self._held.partition(_CLOSE)
        if tag:
            self._rest()
            return thought, answer
        kept = 0 if last else next((n for n in range(len(_CLOSE) - 1, 0, -1) if thought.endswith(_CLOSE[:n])), 0)
        self._held = thought[len(thought) - kept :]
        return thought[: len(thought) - kept], ""

    def _rest(self) -> str:
        """Return the held text. The answer has begun."""
        rest, self._held, self._over = self._held, "", True
        return rest


def reasoning_parser(
    name: ReasoningFormat, tokenizer: Tokenizer, prompt: Sequence[int]
) -> Callable[[], ReasoningParser]:
    """Return a function that makes parsers for the choices of a prompt.

    Chat templates may open the thinking, or close it at once to turn it off. ``deepseek_r1`` takes text for thinking
    where the template does neither; ``qwen3`` only behind an opening tag.
    """
    end = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    inside = end.endswith(_OPEN) or (name == "deepseek_r1" and not end.endswith(_CLOSE))
    return lambda: ReasoningParser(inside=inside)
