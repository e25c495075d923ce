"""Target and draft networks as plain modules."""
