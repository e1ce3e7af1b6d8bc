"""Transport between nodes: TCP between CPU hosts, driven by compiled code."""
