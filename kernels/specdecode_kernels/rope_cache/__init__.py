"""Rotary position embedding fused with the write of keys and values to the paged cache."""
