"""The current machine as a cluster, and the calibration that prices it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shotcast import env
from shotcast.errors import ConfigError
from shotcast.hardware import catalog, cluster, detect
from shotcast.hardware.catalog import GpuSpec, LinkSpec
from shotcast.hardware.cluster import Cluster
from shotcast.planner.calibration import STAND_IN, Calibration, calibrated_parts, load

_BY_HAND = "give a layout by hand, such as 4x1 (tensor x pipeline parallel)"


def calibration_of(gpu: GpuSpec, path: Path | None = None) -> Calibration:
    """Return the calibration that prices a GPU.

    It comes from the file if given, else from ``SHOTCAST_CALIBRATION`` if that is for this GPU, else from the package,
    else from the H200, whose rates a plan scales by data sheets.

    Raises ConfigError if a file is not a calibration.

    Args:
        path: a file written by ``shotcast calibrate``; None for the other sources.
    """
    if path is not None:
        return load("", path)
    own = own_calibration()
    if own is not None and (own.part if own.device == "cpu" else own.gpu.name) == gpu.name:
        return own
    parts = (part for part in calibrated_parts() if (spec := catalog.find(part)) and spec.name == gpu.name)
    return load(next(parts, STAND_IN))


def own_calibration() -> Calibration | None:
    """Return the calibration in ``SHOTCAST_CALIBRATION``; None if the variable is not set."""
    path = env.calibration()
    return load("", Path(path)) if path else None


def cluster_of_gpus(names: Sequence[str], ranks_per_host: int, hosts: int = 1) -> Cluster:
    """Describe hosts with such GPUs as a cluster.

    The network between hosts comes from a packaged description of that GPU, preferably with as many GPUs per node.

    Raises ConfigError if the catalog lacks a GPU, or they are of several kinds.

    Args:
        names: the GPUs of a host, as CUDA names them.
        ranks_per_host: the number of GPUs that a host gives to the engine.
    """
    specs: list[GpuSpec] = []
    for name in dict.fromkeys(names):
        spec = catalog.find(name)
        if spec is None:
            known = ", ".join(one.name for one in catalog.CATALOG)
            raise ConfigError(f"plans know the GPUs {known}, and not {name}; {_BY_HAND}")
        specs.append(spec)
    if len({spec.name for spec in specs}) != 1:
        raise ConfigError(
            f"plans are of equal GPUs, and this machine has {', '.join(dict.fromkeys(names))}; {_BY_HAND}"
        )
    network = None
    if hosts > 1:
        described = [one for one in map(cluster.load, cluster.PACKAGED) if one.gpu.name == specs[0].name]
        if not described:
            raise ConfigError(f"no packaged cluster has the {specs[0].name}, so its network is unknown; {_BY_HAND}")
        network = min(described, key=lambda one: one.gpus_per_node != ranks_per_host).network
    name = f"{hosts} hosts" if hosts > 1 else "this machine"
    return Cluster(name, specs[0], ranks_per_host, network, hosts)


def cluster_of_cpu(calibration: Calibration, ranks: int, memory_bytes: int) -> Cluster:
    """Describe the machine of a CPU calibration as a cluster of one node, whose "GPUs" are the ranks that share it.

    They are priced by measured kernels, so there are no data-sheet figures except the copy rate.
    """
    link = LinkSpec("shared memory", calibration.link.bw_gbps, None, "the calibration")
    gpu = GpuSpec(
        name=calibration.part,
        pattern="$^",
        compute_capability=(0, 0),
        memory_bytes=memory_bytes // ranks,
        memory_bw_gbps=calibration.link.local_gbps,
        bf16_tflops=0.0,
        fp8_tflops=None,
        link=link,
        source="the calibration",
    )
    return Cluster("this machine", gpu, ranks, None, 1)


def this_machine() -> Cluster:
    """Describe the GPUs visible to this process as a cluster of one node. Raises ConfigError if there are none."""
    gpus = detect.visible_gpus()
    if not gpus:
        raise ConfigError(
            "this machine has no GPU that PyTorch sees; name a cluster, or describe the machine by shotcast calibrate"
        )
    return cluster_of_gpus([gpu.name for gpu in gpus], len(gpus))
