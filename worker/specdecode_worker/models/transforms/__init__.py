"""Transforms of loaded networks that make inference cheaper: fusion and quantization."""
