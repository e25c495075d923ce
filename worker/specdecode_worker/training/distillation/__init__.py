"""Training of a draft on captured traffic: read the records, split them, train a student, evaluate it."""
