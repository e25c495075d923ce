"""Draft models: one Drafter for each speculation method, and the registry of the loaded drafts."""
