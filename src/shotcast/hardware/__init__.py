"""Facts about machines: data sheets of known hardware, and this host's hardware. Does not import torch."""
