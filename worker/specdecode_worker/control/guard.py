"""Guard that stops speculation where it is measured to be slower than plain decoding.

For each load (concurrency and context bucket) the guard keeps the time per token with and without speculation. It can
only lower the draft depth to 0, and it reports when it does. It probes a stopped shape again from time to time, and
waits longer after each failed probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdecode_worker.contract import GuardCell, TreeShape

MIN_STEPS = 24
"""Number of steps after which a time per token is considered reliable. STOP_RULES detect a large loss sooner."""
STOP_RULES = ((96, 1.02), (MIN_STEPS, 1.08), (8, 1.3), (4, 2.0))
"""Stop rules as (steps, ratio): after ``steps`` steps, speculation stops if its time per token is more than ``ratio``
times that of plain decoding. A large loss can be distinguished from noise after a few steps. A small loss takes more
steps to detect, but costs little until then. The first rule applies to the slow average, the others to the fast
average, which follows a change sooner.
"""
RESUME_RATIO = 0.98
"""Highest ratio of time per token to plain decoding at which a probe resumes speculation."""
PROBE_EVERY, PROBE_STEPS = 400, 24
"""Steps between probes of a stopped shape, and steps of one probe."""
CHECK_STEPS = 16
"""Number of plain steps directly after a stop that must confirm it. On a machine that has become slower, speculation
appears to lose until plain decoding is timed on that machine as well.
"""
PROBE_SHARE = 0.005
"""Largest share of the steps between probes that a probe may lose. A shape that loses much therefore waits longer."""
MAX_PROBE_WAIT_FACTOR = 16
"""Largest wait between probes, in multiples of PROBE_EVERY. Each failed probe doubles the wait up to this limit."""
EARLY_STOP_RULES = STOP_RULES[2:]
"""Stop rules that also end a probe early."""
MIN_REPORTED_STEPS = EARLY_STOP_RULES[-1][0]
"""Fewest steps after which a stop rule applies, and a time per token is reported."""
SLOW_DECAY, FAST_DECAY = 0.99, 0.97
"""Factors by which the sums of the slow and of the fast average decay at each step."""
_ASSUMED = 10.0
"""Weight, in tokens, of a plain time per token that was measured at start."""


@dataclass(slots=True)
class TimePerToken:
    """Time per token of one sequence, in seconds: the ratio of two exponentially decaying sums."""

    decay: float = FAST_DECAY
    steps: int = 0
    _seconds: float = 0.0
    _tokens: float = 0.0

    def add(self, seconds: float, tokens_per_sequence: float, steps: int = 1) -> None:
        """Add steps that took ``seconds`` and emitted ``tokens_per_sequence`` tokens per sequence, all together.

        Several steps count as equal steps one after the other. The engine adds each step alone; the simulator adds
        many at once.
        """
        decay = self.decay**steps
        weight = (1 - decay) / (1 - self.decay) / steps
        self.steps += steps
        self._seconds = decay * self._seconds + weight * seconds
        self._tokens = decay * self._tokens + weight * tokens_per_sequence

    @property
    def seconds(self) -> float | None:
        """Seconds per token, or None before MIN_STEPS steps."""
        return self.after(MIN_STEPS)

    def after(self, steps: int) -> float | None:
        """Return the seconds per token, or None before ``steps`` steps."""
        return self._seconds / self._tokens if self.steps >= steps else None

    def copy_from(self, other: TimePerToken) -> None:
        """Replace these sums by those of ``other`` and count at least MIN_STEPS steps."""
        self.steps, self._seconds, self._tokens = max(MIN_STEPS, other.steps), other._seconds, other._tokens

    def assume(self, seconds: float) -> None:
        """Set the time per token to a value measured elsewhere, with a weight that later steps soon outweigh."""
        self.steps, self._seconds, self._tokens = MIN_STEPS, _ASSUMED * seconds, _ASSUMED


@dataclass(slots=True)
class ShapeState:
    """Measurements and guard state of one shape at one load.

    ``speculative`` and ``recent`` are the slow and the fast average of its time per token. ``steps_since_decision``
    counts the steps at this load since the last decision, ``probe_wait`` is the number of steps to wait before a probe.
    ``probe`` is the time per token of a probe in progress. ``check`` is that of plain decoding since a stop that is not
    yet confirmed.
    """

    speculative: TimePerToken = field(default_factory=lambda: TimePerToken(SLOW_DECAY))
    recent: TimePerToken = field(default_factory=TimePerToken)
    suppressed: bool = False
    steps_since_decision: int = 0
    probe_wait: int = PROBE_EVERY
    probe: TimePerToken | None = None
    check: TimePerToken | None = None

    @property
    def probe_due(self) -> bool:
        """True if the shape is stopped and has waited long enough for a probe."""
        return self.suppressed and self.steps_since_decision >= self.probe_wait

    @property
    def is_confirmed_stop(self) -> bool:
        """True if the shape is stopped and plain decoding confirmed that the machine itself is not slower."""
        return self.suppressed and self.check is None

    def add(self, seconds: float, tokens: float, steps: int) -> None:
        """Add speculative steps to the averages, and to the probe if one is due."""
        if self.probe_due:
            self.probe = self.probe or TimePerToken()
            self.probe.add(seconds, tokens, steps)
        self.speculative.add(seconds, tokens, steps)
        self.recent.add(seconds, tokens, steps)

    def judge(self, plain: TimePerToken) -> None:
        """Stop, confirm, probe or resume the shape. Do nothing until the time per token of plain decoding is known."""
        plain_seconds = plain.seconds
        if plain_seconds is None:
            return
        if self.check is not None:
            self._confirm_stop(self.check, plain)
        elif self.probe is not None:
            self._judge_probe(self.probe, plain_seconds)
        elif not self.suppressed and self._is_slower(plain_seconds):
            self.suppressed, self.steps_since_decision, self.check = True, 0, TimePerToken()
            self.probe_wait = max(PROBE_EVERY, _steps_until_probe(self.recent, plain_seconds))

    def _is_slower(self, plain_seconds: float) -> bool:
        """Return whether either average meets a stop rule."""
        return _is_slower(self.recent, plain_seconds, STOP_RULES[1:]) or _is_slower(
            self.speculative, plain_seconds, STOP_RULES[:1]
        )

    def _confirm_stop(self, check: TimePerToken, plain: TimePerToken) -> None:
        """Confirm a stop after CHECK_STEPS plain steps, or revoke it if speculation was faster than these steps."""
        plain_seconds = check.after(CHECK_STEPS)
        if plain_seconds is None:
            return
        self.check = None
        speculative = self.recent.after(1)
        if speculative is not None and speculative < plain_seconds:
            self.suppressed, self.probe_wait = False, PROBE_EVERY
            plain.copy_from(check)

    def _judge_probe(self, probe: TimePerToken, plain_seconds: float) -> None:
        """End a probe: resume speculation if it won, else lengthen the wait before the next probe."""
        won = probe.after(PROBE_STEPS)
        if won is not None and won <= RESUME_RATIO * plain_seconds:
            self.suppressed, self.probe_wait = False, PROBE_EVERY
            for time_per_token in (self.speculative, self.recent):
                time_per_token.copy_from(probe)
        elif won is not None or _is_slower(probe, plain_seconds, EARLY_STOP_RULES):
            wait = max(2 * self.probe_wait, _steps_until_probe(probe, plain_seconds))
            self.probe_wait = min(wait, MAX_PROBE_WAIT_FACTOR * PROBE_EVERY)
        else:
            return
        self.probe, self.steps_since_decision = None, 0


Cell = tuple[int, int]
"""Bucket indices of concurrency and context."""


class Guard:
    """Record of step times by load and shape that decides which shapes may run.

    The guard reads no clock: `record_step` receives the duration of each step.
    """

    def __init__(self) -> None:
        self._plain: dict[Cell, TimePerToken] = {}
        self._states: dict[tuple[Cell, TreeShape], ShapeState] = {}

    def without_shapes(self) -> Guard:
        """Return a guard that knows the plain times of this one and nothing of any shape."""
        guard = Guard()
        guard._plain = self._plain
        return guard

    def retain_planned(self, planned: Callable[[Cell, TreeShape], bool]) -> None:
        """Forget shapes for which ``planned`` returns False.

        If such a shape is planned again later, the new plan is based on new evidence.
        """
        self._states = {key: state for key, state in self._states.items() if planned(*key)}

    def allows(self, concurrency: int, context: int, shape: TreeShape) -> bool:
        """Return whether ``shape`` may run at this load now. Plain decoding is always allowed."""
        if shape.nodes == 0:
            return True
        state = self._states.setdefault(((concurrency, context), shape), ShapeState())
        return not state.suppressed or state.probe_due

    def is_probe(self, concurrency: int, context: int, shape: TreeShape) -> bool:
        """Return whether a run of ``shape`` at this load now would be a probe after a stop."""
        state = self._states.get(((concurrency, context), shape))
        return state is not None and state.probe_due

    def assume(self, concurrency: int, context: int, plain_seconds: float) -> None:
        """Set the time per token of plain decoding at this load from a measurement made at start.

        A value that is already known is kept.
        """
        time_per_token = self._plain.setdefault((concurrency, context), TimePerToken())
        if time_per_token.seconds is None:
            time_per_token.assume(plain_seconds)

    def states_at(self, concurrency: int, context: int) -> list[ShapeState]:
        """Return the states of the shapes at this load."""
        return [state for (cell, _), state in self._states.items() if cell == (concurrency, context)]

    def record_step(
        self, concurrency: int, context: int, shape: TreeShape, seconds: float, tokens: float, steps: int = 1
    ) -> None:
        """Record a step without prefill, and update the state of every shape at this load.

        Steps of a shape for which `allows` was never called belong to exploration and are ignored.

        Args:
            concurrency: Bucket index.
            context: Bucket index.
            shape: Draft shape of all requests of the step.
            seconds: Duration of the step.
            tokens: Emitted tokens per sequence.
            steps: Number of equal steps that ``seconds`` and ``tokens`` are the sums of. No decision may be due
                before the last of them.
        """
        cell = (concurrency, context)
        plain = self._plain.setdefault(cell, TimePerToken())
        if shape.nodes == 0:
            plain.add(seconds, tokens, steps)
        elif state := self._states.get((cell, shape)):
            state.add(seconds, tokens, steps)
        for state in self.states_at(concurrency, context):
            state.steps_since_decision += steps
            if state.check is not None and shape.nodes == 0:
                state.check.add(seconds, tokens, steps)
            state.judge(plain)

    def cells(self) -> tuple[GuardCell, ...]:
        """Return one report entry per load and shape, in the order of the loads."""
        return tuple(
            GuardCell(
                concurrency=cell[0],
                context=cell[1],
                speculative=state.speculative.after(MIN_REPORTED_STEPS),
                plain=self._plain.get(cell, TimePerToken()).seconds,
                suppressed=state.is_confirmed_stop,
            )
            for (cell, _), state in sorted(self._states.items(), key=lambda item: item[0][0])
        )


def _steps_until_probe(time_per_token: TimePerToken, plain_seconds: float) -> int:
    """Return the number of steps to wait so that a probe loses at most PROBE_SHARE of them.

    The loss is estimated from ``time_per_token``; ``plain_seconds`` is the time per token of plain decoding.
    """
    ratio = (time_per_token.after(1) or plain_seconds) / plain_seconds
    steps = next((steps for steps, bound in reversed(EARLY_STOP_RULES) if ratio > bound), PROBE_STEPS)
    return int(steps * (ratio - 1) / PROBE_SHARE)


def _is_slower(time_per_token: TimePerToken, plain_seconds: float, bounds: Sequence[tuple[int, float]]) -> bool:
    """Return whether ``time_per_token`` exceeds the first of the ``bounds`` for which it has enough steps."""
    for steps, bound in bounds:
        seconds = time_per_token.after(steps)
        if seconds is not None:
            return seconds > bound * plain_seconds
    return False
