"""Choice of draft shapes and acceptance of drafted tokens.

The package holds trees, samplers, plan dispatch, the guard, exploration and shadow scores. It runs no network.
"""
