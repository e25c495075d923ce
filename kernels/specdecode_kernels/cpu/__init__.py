"""Compiled CPU operations of a decoder block (bf16, AVX-512)."""
