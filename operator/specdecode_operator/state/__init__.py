"""The state of one deployment: what is stored and what lives in the process."""
