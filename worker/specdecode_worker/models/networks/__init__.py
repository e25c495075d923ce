"""Target and draft networks as plain torch modules."""
