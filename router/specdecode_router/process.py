"""Process of the router: settings, parts, and their life."""
