"""Draft proposals: the best few tokens under the noise with which the target will choose."""
