"""Router: one OpenAI endpoint before the workers of a deployment, with streams that survive their worker."""
