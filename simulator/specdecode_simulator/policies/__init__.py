"""Policies: the operator itself, rules of other systems, and oracles."""
