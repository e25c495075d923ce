"""What a draft proposes: the best few tokens under the noise that the target will choose with."""
