"""Workers as the router sees them: addresses, load, this router's share, and calls to their admin ports."""
