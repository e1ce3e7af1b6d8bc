"""Model layers. Each layer defines how it is divided between ranks."""
