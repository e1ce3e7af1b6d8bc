"""Transport between nodes: TCP between CPU hosts, driven by compiled code."""

from dataclasses import replace

from shotcast.transport.cpu import COMPILED

HOSTS = replace(
    COMPILED,
    field="hosts",
    missing="{name} has no form for CPU ranks on several nodes",
    build="shotcast.transport.network.executor:build",
    least_nodes=2,
)
"""CPU ranks on several nodes."""
