"""Division of a step's prompt budget between prompts: short prompts do not wait for long ones, and none starves.

Prompts form two lanes by the number of tokens left to prefill. The oldest long prompts keep half of the budget, short
prompts get the other half, and each lane may use what the other one leaves. Within a lane prompts are served in order
of arrival. Equal shares for all prompts would instead delay every long prompt to the end of the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

LONG_SHARE = 2
"""Long prompts keep 1/LONG_SHARE of the prompt budget of a step, so they take at most twice as long as alone."""
SHORT_PROMPT_TOKENS = 512
"""Most tokens left to prefill of a short prompt. At least eight such prompts fit the step of a large GPU."""
STEP_SECONDS = 0.25
"""Time that a step with prompt chunks should take at most, in seconds.

A request behind a long prompt waits for about one such step, and its tokens then come at this interval. The value keeps
a short answer well below four seconds where a full step takes longer, i.e. on a CPU. A GPU never reaches it.
"""


def short_prompt_tokens(max_num_batched_tokens: int) -> int:
    """Return the most tokens left to prefill of a short prompt, for steps of this token budget."""
    return min(SHORT_PROMPT_TOKENS, max(max_num_batched_tokens // LONG_SHARE, 1))


def share_prompt_budget(remaining: Sequence[int], waiting_short_tokens: int, budget: int, short: int) -> list[int]:
    """Return the tokens that each prompt in progress may prefill in a step.

    Args:
        remaining: Tokens left to prefill of the prompts in progress, oldest first.
        waiting_short_tokens: Tokens of the short prompts that may be admitted in this step.
        budget: Tokens that prompts may use in this step.
        short: Most tokens left to prefill of a short prompt.
    """
    shares = [0] * len(remaining)
    reserved_for_long = min(sum(tokens for tokens in remaining if tokens > short), -(-budget // LONG_SHARE))
    left = budget - reserved_for_long
    for index, tokens in enumerate(remaining):
        if tokens <= short:
            shares[index] = min(tokens, left)
            left -= shares[index]
    left += reserved_for_long - min(waiting_short_tokens, left)
    for index, tokens in enumerate(remaining):
        if tokens > short:
            shares[index] = min(tokens, left)
            left -= shares[index]
    return shares


class PrefillLimit:
    """Limit of the prompt tokens of a step that keeps its duration near STEP_SECONDS.

    The limit follows the measured steps. Text does not depend on it, because it does not depend on the batch.
    """

    def __init__(self, most: int, least: int, *, timed: bool = False) -> None:
        """Start without a measurement.

        Args:
            most: Token budget of a step, which is the limit until a step was measured.
            least: Smallest limit.
            timed: Start with ``least`` instead, so that the first prompt causes no long step.
        """
        self.tokens = least if timed else most
        self._most, self._least = most, least
        self._recent: deque[int] = deque(maxlen=2)

    def record_step(self, prompt_tokens: int, seconds: float) -> None:
        """Update the limit from the duration of a step with ``prompt_tokens`` tokens of prompts.

        Smaller steps than ``least`` are ignored: most of their time does not depend on the prompt tokens. Of two steps
        the faster one counts, so that one interrupted step does not lower the limit.
        """
        if prompt_tokens < self._least or seconds <= 0:
            return
        self._recent.append(int(prompt_tokens * STEP_SECONDS / seconds))
        self.tokens = min(max(*self._recent, self._least), self._most)
