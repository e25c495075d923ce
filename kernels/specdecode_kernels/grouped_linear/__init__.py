"""Products of rows with the matrix of their expert, and the grouping of rows by expert."""
