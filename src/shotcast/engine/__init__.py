"""The LLM inference engine: requests in, tokens out."""
