"""A matrix whose weights are int4, int8 or fp8: less to read, the same products."""
