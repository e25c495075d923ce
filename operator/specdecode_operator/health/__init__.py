"""Workers that differ from their peers, and the remedy."""
