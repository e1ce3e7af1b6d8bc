"""Clusters as data: a GPU, the GPUs of a node, and the network between nodes, each figure with its source.

A description is a YAML file. The packaged ones are in ``hardware/clusters``; a path names any other. Fields match
AIConfigurator's system files (``gpu``, ``node``, in bytes, seconds and floating-point operations per second), so these
load unchanged. Instead of figures, ``gpu`` may be a name in :mod:`shotcast.hardware.catalog`. Two fields are additions:
``num_nics_per_node`` of ``node``, for GPUs that share network adapters, and ``switch``, with ``num_nodes_per_leaf``,
``oversubscription`` and ``hop_latency``.

``docs/reference/planner.md`` lists the fields that do not affect prices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shotcast.errors import ConfigError, similar
from shotcast.hardware import catalog
from shotcast.hardware.catalog import GpuSpec, LinkSpec
from shotcast.hardware.description import Fields, read_yaml

PACKAGED = {
    "a100x4": "a100-x4-slingshot",
    "a100x8": "dgx-a100",
    "h100x8": "dgx-h100",
    "h200x4": "h200-x4-ndr",
    "h200x8": "dgx-h200",
    "b200x8": "dgx-b200",
}
"""The packaged descriptions and their files, named by the GPU and the number of GPUs per node."""

_GIGA, _TERA = 1e9, 1e12
_BYTES_PER_S = ("bytes/s", 1e6, 1e15)
_FLOPS = ("operations/s", 1e9, 1e19)
_SECONDS = ("seconds", 1e-9, 1.0)
_COUNT = ("", 1, 1 << 20)
_GPU_FIGURES = {
    "mem_bw": _BYTES_PER_S,
    "mem_capacity": ("bytes", 1e8, 1e15),
    "float16_tc_flops": _FLOPS,
    "bfloat16_tc_flops": _FLOPS,
    "fp8_tc_flops": _FLOPS,
    "sm_version": ("", 1, 1000),
}
_UNUSED_FLOPS = ("float32_tc_flops", "int8_tc_flops", "fp4_tc_flops")
_REPLACED_BY_CALIBRATIONS = ("mem_bw_empirical_scaling_factor", "mem_empirical_constant_latency")
_OTHER_GPU_FIELDS = ("name", "source", "power", *_UNUSED_FLOPS, *_REPLACED_BY_CALIBRATIONS)
_NODE_FIGURES = {
    "num_gpus_per_node": _COUNT,
    "inter_node_bw": _BYTES_PER_S,
    "intra_node_bw": _BYTES_PER_S,
    "p2p_latency": _SECONDS,
    "num_gpus_per_rack": _COUNT,
    "inter_rack_bw": _BYTES_PER_S,
    "inter_rack_latency": _SECONDS,
    "num_nics_per_node": _COUNT,
}
_OTHER_NODE_FIELDS = ("name", "source", "inter_node_name", "inter_node_source", "pcie_bw")
_SWITCH_FIGURES = {"num_nodes_per_leaf": _COUNT, "oversubscription": ("", 1e-3, 1e3), "hop_latency": _SECONDS}
_TOP_FIELDS = ("name", "gpu", "node", "switch", "misc", "data_dir")


@dataclass(frozen=True, slots=True)
class SwitchSpec:
    """The switches between nodes: leaves, which join nodes, and a spine, which joins leaves."""

    nodes_per_leaf: int  # nodes that a leaf joins
    oversubscription: float  # the bandwidth of all nodes of a leaf, over that of the leaf to others
    hop_us: float  # microseconds of a further switch; a message to another leaf passes two more than one within a leaf
    source: str  # of the figures


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """The network between nodes."""

    name: str
    bw_gbps: float  # GB/s of each GPU in each direction, where all GPUs of a node send
    latency_us: float  # microseconds from a GPU's store to its arrival at a GPU of another node of the same leaf
    source: str  # of the figures
    gpus_per_nic: int = 1  # GPUs that share a network adapter
    # the switches; None where all nodes are as near to each other, and nothing is shared on the way
    switch: SwitchSpec | None = None

    def over(self, nodes: int) -> tuple[float, float]:
        """Return the latency in microseconds and each GPU's GB/s when all GPUs of ``nodes`` adjacent nodes send at
        once.

        If they span several leaves, both describe messages to another leaf, which are the slowest.
        """
        if self.switch is None or nodes <= self.switch.nodes_per_leaf:
            return self.latency_us, self.bw_gbps
        return self.latency_us + 2 * self.switch.hop_us, self.bw_gbps / self.switch.oversubscription


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster: nodes of equal GPUs."""

    name: str
    gpu: GpuSpec
    gpus_per_node: int  # GPUs that the link of ``gpu`` joins
    network: NetworkSpec | None  # what joins nodes; None where there is one node
    nodes: int | None = None  # how many there are; None for as many as are asked for
    # those of one host; fewer where the link joins several hosts of a rack. None for all of a node
    gpus_per_host: int | None = None


def load(name: str) -> Cluster:
    """Load a cluster from a packaged description, by its name or file name, or from a YAML file. Raises ConfigError if
    there is none, or if a field is missing, unknown or invalid.
    """
    path = Path(name)
    if name.endswith((".yaml", ".yml")) or os.path.isfile(path):
        return parse(read_text(path, "the cluster"), name)
    stem = PACKAGED.get(name.lower(), name)
    if stem not in PACKAGED.values():
        hint = similar("similar names: {}; ", name.lower(), PACKAGED, 3, 0.4)
        raise ConfigError(f"there is no cluster {name!r}; {hint}accepted: {', '.join(PACKAGED)}, or a YAML file")
    file = resources.files("shotcast.hardware") / "clusters" / f"{stem}.yaml"
    return parse(file.read_text(), name)


def read_text(path: Path, what: str) -> str:
    """Read a text file. Raises ConfigError naming ``what`` it is, if it cannot be read or is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {what} {path}: it is no text in UTF-8 ({error.reason})") from error


def parse(text: str, origin: str) -> Cluster:
    """Parse a cluster description in YAML. Raises ConfigError as :func:`load` does."""
    fields = Fields(read_yaml(text, origin, "a description: it must be a mapping with gpu and node"), origin, {})
    fields.only(_TOP_FIELDS)
    node = fields.part("node", _NODE_FIGURES, _OTHER_NODE_FIELDS)
    gpu = _gpu(fields, node)
    gpus_per_node, gpus_per_host = node.count("num_gpus_per_node"), None
    network = _network(fields, node, gpu.link)
    if network is not None and _is_rack(node, gpu.link):
        gpus_per_node, gpus_per_host = node.count("num_gpus_per_rack"), gpus_per_node
    name = fields.text("name", Path(origin).stem)
    return Cluster(name, gpu, gpus_per_node, network, gpus_per_host=gpus_per_host)


def _is_rack(node: Fields, link: LinkSpec) -> bool:
    """Return whether the GPUs of a rack share the link type of a node, which makes the rack one node in our terms."""
    return "num_gpus_per_rack" in node.values and node.number("inter_node_bw") / _GIGA >= link.paper_bw_gbps


def _network(fields: Fields, node: Fields, link: LinkSpec) -> NetworkSpec | None:
    """Return the network between nodes; for AIConfigurator's racks, between racks, or one leaf of switches per rack."""
    if "inter_node_bw" not in node.values:
        for name in ("num_nics_per_node", "num_gpus_per_rack", "inter_rack_bw", "inter_rack_latency"):
            if name in node.values:
                raise ConfigError(f"{node.origin}: {name} is of a network, and there is no inter_node_bw")
        if "switch" in fields.values:
            raise ConfigError(f"{fields.origin}: switch is of a network, and node has no inter_node_bw")
        return None
    name = node.text("inter_node_name", "network")
    source = node.text("inter_node_source", node.text("source", fields.origin))
    gpus, bw_gbps, latency_us = (
        node.count("num_gpus_per_node"),
        node.number("inter_node_bw") / _GIGA,
        node.number("p2p_latency") * 1e6,
    )
    switch = None
    if "num_gpus_per_rack" in node.values:
        if "switch" in fields.values:
            raise ConfigError(f"{fields.origin}: num_gpus_per_rack and switch both say what joins nodes; give one")
        rack = node.count("num_gpus_per_rack")
        if rack % gpus:
            raise ConfigError(f"{node.origin}: a rack of {rack} GPUs is no whole number of nodes of {gpus}")
        rack_gbps = node.number("inter_rack_bw") / _GIGA
        rack_us = node.number("inter_rack_latency") * 1e6 if "inter_rack_latency" in node.values else latency_us
        if _is_rack(node, link):
            bw_gbps, latency_us = rack_gbps, rack_us
        else:
            hop_us = max(0.0, rack_us - latency_us) / 2
            switch = _switch(node, rack // gpus, bw_gbps / rack_gbps, hop_us, source)
    elif "switch" in fields.values:
        part = fields.part("switch", _SWITCH_FIGURES, ("source",))
        hop = part.value("hop_latency")  # which may be 0
        hop_us = 0.0 if hop == 0 and not isinstance(hop, bool) else part.number("hop_latency") * 1e6
        said = part.text("source", fields.origin)
        switch = _switch(part, part.count("num_nodes_per_leaf"), part.number("oversubscription"), hop_us, said)
    gpus_per_nic = 1
    if "num_nics_per_node" in node.values:
        nics = node.count("num_nics_per_node")
        if gpus % nics:
            raise ConfigError(f"{node.origin}: {gpus} GPUs do not share {nics} adapters evenly; accepted: a divisor")
        gpus_per_nic = gpus // nics
    return NetworkSpec(name, bw_gbps, latency_us, source, gpus_per_nic, switch)


def _switch(fields: Fields, nodes: int, oversubscription: float, hop_us: float, source: str) -> SwitchSpec:
    if oversubscription < 1:
        raise ConfigError(
            f"{fields.origin}: oversubscription is {oversubscription:.3g}, so what leaves a leaf, or a rack, has more "
            "bandwidth than its nodes; accepted: 1 or more"
        )
    return SwitchSpec(nodes, oversubscription, hop_us, source)


def _gpu(fields: Fields, node: Fields) -> GpuSpec:
    value = fields.values.get("gpu")
    if isinstance(value, str):
        spec = next((spec for spec in catalog.CATALOG if spec.name == value), None)
        if spec is None:
            known = ", ".join(spec.name for spec in catalog.CATALOG)
            raise ConfigError(
                f"{fields.origin}: there is no GPU {value!r} in the catalog; accepted: {known}, or figures"
            )
        if "intra_node_bw" in node.values:
            raise ConfigError(f"{fields.origin}: intra_node_bw is that of the catalog for {value}; leave it out")
        return spec
    gpu = fields.part("gpu", _GPU_FIGURES, _OTHER_GPU_FIELDS)
    source = gpu.text("source", fields.origin)
    flops = "bfloat16_tc_flops" if "bfloat16_tc_flops" in gpu.values else "float16_tc_flops"
    link = LinkSpec(
        node.text("name", "link"), node.number("intra_node_bw") / _GIGA, None, node.text("source", fields.origin)
    )
    version = gpu.count("sm_version") if "sm_version" in gpu.values else 0
    return GpuSpec(
        name=gpu.text("name", Path(fields.origin).stem),
        pattern="$^",  # a description is not what CUDA calls a device
        compute_capability=(version // 10, version % 10),
        memory_bytes=gpu.count("mem_capacity"),
        memory_bw_gbps=gpu.number("mem_bw") / _GIGA,
        bf16_tflops=gpu.number(flops) / _TERA,
        fp8_tflops=gpu.number("fp8_tc_flops") / _TERA if gpu.values.get("fp8_tc_flops") else None,
        link=link,
        source=source,
    )
