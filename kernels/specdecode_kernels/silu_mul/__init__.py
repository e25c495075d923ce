"""The gate of an MLP whose gate and up projections are one matrix."""
