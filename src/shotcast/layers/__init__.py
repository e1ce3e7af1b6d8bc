"""What models are made of: each layer owns how it is divided between ranks."""
