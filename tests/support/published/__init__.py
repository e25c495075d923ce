"""Models as others publish them: added tokens, folders and hubs."""
