"""The HTTP server: OpenAI's interface to the engine."""
