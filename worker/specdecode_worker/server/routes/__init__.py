"""HTTP routes of the public port and of the admin port."""
