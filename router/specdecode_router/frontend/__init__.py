"""HTTP for clients: routes, authentication, limits, and the writing of answers."""
