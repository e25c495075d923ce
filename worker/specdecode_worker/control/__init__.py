"""Decisions of a worker between two plans: rows of the plan, exploration and the guard. No torch."""
