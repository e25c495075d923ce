"""One request from its first attempt to its last: journal, attempts, continuation, suspicion."""
