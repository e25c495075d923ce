"""Policies of the scheduler: order of the waiting requests, shares of the prompt budget and deadlines."""
