"""Trainable draft networks: initial weights, attention for training and the unrolled forward pass."""
