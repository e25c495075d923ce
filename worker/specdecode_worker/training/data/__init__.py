"""Training data: prompts, target rollouts, shards of recorded states and batches."""
