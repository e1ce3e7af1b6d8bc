"""An HTTP server with OpenAI's API for the engine."""
