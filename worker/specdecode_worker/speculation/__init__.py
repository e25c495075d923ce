"""What to draft and what became of it: trees, coupled choice, plan rows, guard, shadow scores. No network runs here."""
