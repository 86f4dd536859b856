"""The HTTP face: OpenAI-compatible API, admin port, health and metrics."""
