"""Drafts: each method is a file with a Drafter; the roster holds those that are loaded and asks the right one."""
