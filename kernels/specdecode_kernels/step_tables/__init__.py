"""Bookkeeping of a captured decode step over its tables: what a pass reads, where a draft goes, what is committed."""
