"""Linear layers whose weights are stored as int4, int8 or fp8, so that fewer bytes are read."""
