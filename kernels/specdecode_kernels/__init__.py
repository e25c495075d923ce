"""Leaves: each operation has a plain-torch definition of what it computes and, where it pays, a Triton kernel."""
