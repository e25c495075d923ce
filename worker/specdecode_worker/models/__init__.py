"""Target and draft networks, their configs and checkpoints. Attention and its cache are passed in by the caller."""
