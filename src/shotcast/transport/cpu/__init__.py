"""Collectives for CPU ranks, written as host code that numba compiles."""

from shotcast.device import fingerprint
from shotcast.device.fingerprint import Tree
from shotcast.transport.transport import Transport


def host_call(tree: Tree, reference: str) -> str:
    """Compute the fingerprint of the compiled code of a host call."""
    return fingerprint.of_host_call(tree, reference, "shotcast.device.cpu.compilation:_OPTIONS")


COMPILED = Transport(
    name="compiled",
    device="cpu",
    field="cpu",
    missing="{name} has no compiled form for CPU ranks; SHOTCAST_CPU_KERNELS=interpreter runs its kernel",
    build="shotcast.transport.cpu.executor:build",
    fingerprint=host_call,
)
"""CPU ranks on one host."""
