"""Admission: bounded queues by tenant and priority, deadlines, and requests held while there is no worker."""
