"""Choice of the drafts that are merged with the draft of a task, from their credit and step times. Pure."""
