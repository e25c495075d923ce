"""The SpecDecodeDeployment resource, as pydantic models: the interface to users."""
