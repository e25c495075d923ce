"""The description of the public port in OpenAPI's terms: what is accepted, what is answered, how it fails."""
