"""Recorded step times and acceptance, and the tables made from them."""
