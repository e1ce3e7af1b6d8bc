"""The layers of models. Each layer owns how it is divided between ranks."""
