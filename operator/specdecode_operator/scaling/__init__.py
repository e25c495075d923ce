"""How many workers: demand against what one can carry, up soon, down late, never on doubtful numbers. Pure."""

from specdecode_operator.scaling.replicas import Demand, Scaled, scale

__all__ = ["Demand", "Scaled", "scale"]
