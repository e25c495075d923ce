"""Reports of workers: fetched, validated, and turned into differences."""
