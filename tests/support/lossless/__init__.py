"""Support for the lossless suite: drafts, and decoding one token at a time."""
