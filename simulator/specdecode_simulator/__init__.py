"""Simulation of the operator: its decisions on modelled workers, compared with other rules and with oracles."""
