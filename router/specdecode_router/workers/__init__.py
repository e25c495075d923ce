"""Workers as the router sees them: addresses, load, reports, and calls to their admin ports."""
