"""Files that a training run writes: weights, config.json, lineage.json and the model card."""
