"""Target and draft networks as plain modules. They know weights and positions; how keys are kept is passed in."""
