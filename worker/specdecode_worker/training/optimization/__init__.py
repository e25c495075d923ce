"""The training loop: objective, schedule, checkpoints and data-parallel processes."""
