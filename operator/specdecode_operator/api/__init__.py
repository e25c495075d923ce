"""The promise to users: the SpecDecodeDeployment resource. Pydantic models are its single source."""
