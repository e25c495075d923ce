"""Outliers among the workers, and their remediation. Pure."""
