"""OpenAPI description of the public port: request bodies, responses and errors."""
