"""Linear layers with weights stored as int4, int8 or fp8, so that fewer bytes are read."""
