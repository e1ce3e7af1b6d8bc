"""The inference engine: requests in, tokens out."""
