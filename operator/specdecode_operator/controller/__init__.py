"""The control loop: from events to children and status."""
