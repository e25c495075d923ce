"""Modelled workers and the fleet that they form."""
