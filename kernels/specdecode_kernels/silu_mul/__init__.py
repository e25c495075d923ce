"""Gated activation SiLU(gate) * up of an MLP whose gate and up projections are one matrix."""
