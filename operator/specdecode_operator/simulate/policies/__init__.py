"""Who decides in a simulation: our operator, the rules of other systems, and oracles that know the truth."""
