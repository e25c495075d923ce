"""Shapes of networks, read from config.json."""
