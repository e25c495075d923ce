"""Gated activation SiLU(gate) * up of an MLP with a joined gate and up projection."""
