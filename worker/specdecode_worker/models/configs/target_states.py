"""What a draft reads of the target's pass: which layers' inputs, and whether the final hidden state.

The target concatenates them in this order; several drafts over one target share a pass by the union of their reads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reads:
    """``layers``: inputs of these target layers, in this order (layer N of an N-layer target is the last block's
    output before the final norm). ``final``: the final hidden state after the norm, behind them."""

    layers: tuple[int, ...] = ()
    final: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers) or self.final

    def width(self, hidden_size: int) -> int:
        """Width of the states of one token."""
        return (len(self.layers) + self.final) * hidden_size

    def __or__(self, other: Reads) -> Reads:
        """The least that serves both, layers rising."""
        return Reads(tuple(sorted({*self.layers, *other.layers})), self.final or other.final)

    def picks(self, part: Reads) -> tuple[int, ...]:
        """Where the states of ``part`` stand among these: indices of pieces of the hidden size.

        ``aux_TA.unflatten(-1, (-1, hidden_size))[:, picks].flatten(1)`` is what ``part`` alone would have read.
        """
        assert self | part == Reads(tuple(sorted(set(self.layers))), self.final), "a part reads no more than the whole"
        return tuple(self.layers.index(layer) for layer in part.layers) + (len(self.layers),) * part.final


NOTHING = Reads()
