"""Hidden states of the target that a draft reads: inputs of layers, and the final hidden state.

The target concatenates them in this order. Several drafts of one target share a pass, which computes the union of their
states.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetStates:
    """Set of hidden states that a draft reads.

    ``layers``: inputs of these target layers, in this order (layer N of an N-layer target is the last block's output
    before the final norm). ``final``: whether the final hidden state, after the norm, follows them.
    """

    layers: tuple[int, ...] = ()
    final: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers) or self.final

    def width(self, hidden_size: int) -> int:
        """Return the width of the concatenated states of one token."""
        return (len(self.layers) + self.final) * hidden_size

    def __or__(self, other: TargetStates) -> TargetStates:
        """Return the union of both sets, with layers in ascending order."""
        return TargetStates(tuple(sorted({*self.layers, *other.layers})), self.final or other.final)

    def indices_of(self, part: TargetStates) -> tuple[int, ...]:
        """Return the positions of the states of ``part`` among these, in units of the hidden size.

        ``aux_TA.unflatten(-1, (-1, hidden_size))[:, indices].flatten(1)`` is the input that ``part`` expects.
        """
        assert self | part == TargetStates(tuple(sorted(set(self.layers))), self.final), (
            "a part reads no more than the whole"
        )
        return tuple(self.layers.index(layer) for layer in part.layers) + (len(self.layers),) * part.final


NO_STATES = TargetStates()
