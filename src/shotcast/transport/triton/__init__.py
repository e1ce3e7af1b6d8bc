"""The collectives as Triton kernels: compiled for NVIDIA GPUs, or run by Triton's interpreter over shared memory."""

from dataclasses import replace

from shotcast.device import fingerprint
from shotcast.device.fingerprint import Tree
from shotcast.transport.transport import Transport


def _launch(tree: Tree, reference: str) -> str:
    return fingerprint.of_launch(tree, reference, "shotcast.transport.triton.binding:COMPILE_OPTIONS")


GPUS = Transport(
    name="triton",
    device="cuda",
    field="triton",
    missing="{name} has no Triton kernel",
    build="shotcast.transport.triton.build:on_gpus",
    fingerprint=_launch,
    grids=True,
    most_words=4096,
    cells=True,
    consecutive=True,
    only_sums=True,
    writes_everywhere=True,
)
INTERPRETER = replace(
    GPUS,
    name="interpreter",
    device="cpu",
    build="shotcast.transport.triton.build:interpreted",
    serial=True,
    most_words=8192,  # the whole row of a fused call is one tile
)
"""CPU ranks of one host, on which Triton's interpreter runs the GPU kernels."""
