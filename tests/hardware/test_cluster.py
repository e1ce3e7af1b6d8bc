"""Descriptions of clusters: the packaged ones, those of other tools, and what is wrong with a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.errors import ConfigError
from shotcast.hardware import catalog, cluster

# fields and units of AIConfigurator's system files, with figures of a GPU that does not exist
AICONFIGURATOR = """
data_dir: data/nothing
gpu:
  mem_bw: 4000000000000
  mem_bw_empirical_scaling_factor: 0.8
  mem_empirical_constant_latency: 0.000003
  mem_capacity: 100000000000
  float16_tc_flops: 800000000000000
  int8_tc_flops: 1600000000000000
  fp8_tc_flops: 1600000000000000
  power: 700
  sm_version: 90
node:
  num_gpus_per_node: 8
  inter_node_bw: 25000000000
  intra_node_bw: 450000000000
  pcie_bw: 64000000000
  p2p_latency: 0.00001
misc:
  nccl_mem:
    1: 0
"""
# fields of its files of racks, of Intel's GPUs, and of switches and adapters, which are ours
RACKS = AICONFIGURATOR.replace(
    "  p2p_latency",
    "  num_gpus_per_rack: 64\n  inter_rack_bw: 12500000000\n  inter_rack_latency: 0.000011\n  p2p_latency",
)
SWITCHES = """
gpu: H100 SXM
node:
  num_gpus_per_node: 8
  num_nics_per_node: 4
  inter_node_bw: 25.0e+9
  p2p_latency: 5.0e-6
  inter_node_source: made up
switch:
  num_nodes_per_leaf: 16
  oversubscription: 2
  hop_latency: 0.5e-6
  source: also made up
"""
FOLDER = Path(cluster.__file__).parent / "clusters"
BOMB = ", ".join(f"&a{number + 1} [*a{number}, *a{number}]" for number in range(40))
"""Lists in lists, of which the last one has 2^40 entries when it is written out."""


@pytest.mark.parametrize("name", cluster.PACKAGED)
def test_packaged_descriptions_have_sources(name: str) -> None:
    found = cluster.load(name)
    assert found.name == name == f"{found.gpu.name.split()[0].lower()}x{found.gpus_per_node}"
    assert found.gpu in catalog.CATALOG
    file = FOLDER / f"{cluster.PACKAGED[name]}.yaml"
    assert cluster.load(name.upper()) == cluster.load(file.stem) == found
    assert cluster.load(str(file)).gpu == found.gpu
    assert found.network is not None
    assert found.network.source
    assert 1 <= found.network.latency_us <= 20
    assert 10 <= found.network.bw_gbps <= 100


def test_every_packaged_description_has_a_name() -> None:
    assert sorted(cluster.PACKAGED.values()) == sorted(file.stem for file in FOLDER.iterdir())


def test_a_description_of_aiconfigurator() -> None:
    found = cluster.parse(AICONFIGURATOR, "x.yaml")
    gpu = found.gpu
    assert (gpu.memory_bw_gbps, gpu.memory_bytes, gpu.bf16_tflops, gpu.fp8_tflops) == (4000, 10**11, 800, 1600)
    assert gpu.compute_capability == (9, 0)
    assert gpu.link.usable_bw_gbps == 450
    assert found.gpus_per_node == 8
    assert found.network is not None
    assert (found.network.bw_gbps, found.network.latency_us) == (25, 10)
    assert catalog.find(gpu.name) is None


def test_racks_of_aiconfigurator() -> None:
    found = cluster.parse(RACKS, "x.yaml")
    assert found.gpus_per_node == 8
    assert found.network is not None
    assert found.network.switch == cluster.SwitchSpec(8, 2.0, pytest.approx(0.5), "x.yaml")
    # nodes that the link of their GPUs joins are one node of ours, and the network joins racks
    text = RACKS.replace("inter_node_bw: 25000000000", "inter_node_bw: 450000000000")
    found = cluster.parse(text, "x.yaml")
    assert (found.gpus_per_node, found.network and found.network.switch) == (64, None)
    assert found.network is not None
    assert (found.network.bw_gbps, found.network.latency_us) == (12.5, 11)
    assert found.gpus_per_host == 8
    # adapters are of a node, also where the link joins the nodes of a rack
    shared = cluster.parse(text.replace("  pcie_bw", "  num_nics_per_node: 4\n  pcie_bw"), "x.yaml").network
    assert shared is not None
    assert shared.gpus_per_nic == 2
    # the link of a GPU of the catalog counts as well
    named = "gpu: B200\nnode: {num_gpus_per_node: 4, inter_node_bw: 900.0e+9, p2p_latency: 1.0e-6, "
    named += "num_gpus_per_rack: 72, inter_rack_bw: 50.0e+9, inter_rack_latency: 5.0e-6}"
    found = cluster.parse(named, "x.yaml")
    assert (found.gpus_per_node, found.gpus_per_host) == (72, 4)
    other = AICONFIGURATOR.replace("  int8_tc_flops", "  float32_tc_flops: 12280000000000\n  int8_tc_flops")
    assert cluster.parse(other.replace("  sm_version: 90\n", ""), "x.yaml").gpu.compute_capability == (0, 0)


def test_switches_and_adapters() -> None:
    found = cluster.parse(SWITCHES, "x.yaml")
    assert found.network is not None
    assert (found.network.gpus_per_nic, found.network.bw_gbps) == (2, 25)
    assert found.network.switch == cluster.SwitchSpec(16, 2.0, pytest.approx(0.5), "also made up")
    assert found.network.over(16) == (5.0, 25.0)
    assert found.network.over(17) == (6.0, 12.5)
    still = cluster.parse(SWITCHES.replace("0.5e-6", "0"), "x.yaml").network
    assert still is not None
    assert still.over(32) == (5.0, 12.5)


def test_a_file_and_one_node(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("gpu: H100 SXM\nnode: {num_gpus_per_node: 2}\n")
    found = cluster.load(str(file))
    assert (found.name, found.gpus_per_node, found.network) == ("mine", 2, None)
    with pytest.raises(ConfigError, match=r"cannot read the cluster .*no\.yaml"):
        cluster.load(str(tmp_path / "no.yaml"))
    file.write_bytes(b"gpu: \xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read the cluster .*mine\.yaml: it is no text in UTF-8"):
        cluster.load(str(file))


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: [", "is not YAML"),
        ("- 1", "is not a description"),
        ("gpu: H200 SXM", "node must be a mapping"),
        ("gpu: H200\nnode: {num_gpus_per_node: 8}", "no GPU 'H200' in the catalog; accepted: A100"),
        ("gpu: H200 SXM\nnode: {num_gpus_per_node: 8, intra_node_bw: 1}", "leave it out"),
        ("gpu: H200 SXM\nnode: {num_gpus_per_node: 8, inter_node_bw: 50.0e+9}", "lacks p2p_latency"),
        ("gpu: H200 SXM\nnode: {num_gpus_per_node: 2.5}", "whole number"),
        ("gpu: H200 SXM\nnode: {num_gpus_per_node: -8}", "above 0"),
        ("gpu: H200 SXM\nnode: {num_gpus_per_node: true}", "above 0"),
        ("gpu: H200 SXM\nnode: {gpus: 8}", "unknown field 'gpus'; accepted: "),
        ("gpu: {mem_bw: 1}\nnode: {num_gpus_per_node: 8, intra_node_bw: 450.0e+9}", "gpu lacks mem_capacity"),
        ("gpu: {tflops: 1}\nnode: {num_gpus_per_node: 8}", "unknown field 'tflops'"),
        ("colour: red", "unknown field 'colour'"),
        (SWITCHES.replace("num_nics_per_node: 4", "num_nics_per_node: 3"), "3 adapters evenly"),
        (SWITCHES.replace("oversubscription: 2", "oversubscription: 0.5"), "accepted: 1 or more"),
        (SWITCHES.replace("hop_latency: 0.5e-6", "hop_latency: -1"), "hop_latency must be a number above 0, not -1"),
        (SWITCHES.replace("  hop_latency: 0.5e-6\n", ""), "switch lacks hop_latency"),
        (SWITCHES.replace("num_nodes_per_leaf", "leaf"), "unknown field 'leaf'; accepted: hop_latency"),
        ("gpu: H200 SXM\nnode: {num_gpus_per_node: 8}\nswitch: {}", "switch is of a network"),
        ("gpu: H200 SXM\nnode: {num_gpus_per_node: 8, num_nics_per_node: 8}", "num_nics_per_node is of a network"),
        (RACKS.replace("rack: 64", "rack: 60"), "60 GPUs is no whole number of nodes of 8"),
        (RACKS.replace("rack_bw: 12", "rack_bw: 32"), "accepted: 1 or more"),
        (RACKS + "switch: {}", "both say what joins nodes"),
        # figures of another unit: GB, TB/s, TFLOPS, microseconds
        (AICONFIGURATOR.replace("100000000000", "80"), r"mem_capacity must be from 1e\+08 to 1e\+15 bytes, not 80"),
        (AICONFIGURATOR.replace("4000000000000", "4.8"), r"mem_bw must be from 1e\+06 to 1e\+15 bytes/s, not 4\.8"),
        (
            AICONFIGURATOR.replace("float16_tc_flops: 800000000000000", "float16_tc_flops: 989"),
            "1e.19 operations/s, not",
        ),
        (AICONFIGURATOR.replace("0.00001", "5"), "p2p_latency must be from 1e-09 to 1 seconds, not 5"),
        (AICONFIGURATOR.replace("num_gpus_per_node: 8", "num_gpus_per_node: 1e30"), "to 1.04858e.06, not 1e.30"),
        (AICONFIGURATOR.replace("num_gpus_per_node: 8", "num_gpus_per_node: 0x" + "f" * 5000), "one of 20000 bits"),
        # a field that is there twice, of which YAML would take the last
        (SWITCHES.replace("gpu: H100 SXM", "gpu: H100 SXM\ngpu: B200"), "x.yaml, line 3: 'gpu' is there twice"),
        (SWITCHES.replace("num_nics_per_node", "num_gpus_per_node"), "line 5: 'num_gpus_per_node' is there twice"),
        # values that YAML's loader ends on
        (SWITCHES + "name: 2026-13-45", "is not YAML: month must be in"),
        (SWITCHES + "name: " + "1" * 5000, "is not YAML: Exceeds the limit"),
        ("[" * 3000, "is not YAML: maximum recursion depth"),
        # values of another type
        (SWITCHES + "name: [a, b]", r"name must be text, not \['a', 'b'\]"),
        (SWITCHES + "name:", "name must be text, not None"),
        (SWITCHES.replace("made up", "3"), "inter_node_source must be text, not 3"),
        (f"misc: [&a0 [x], {BOMB}]\nnode: *a40\ngpu: H200 SXM", "node must be a mapping of figures, not "),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster.parse(text, "x.yaml")


def test_an_unknown_cluster_is_near_others() -> None:
    with pytest.raises(ConfigError, match=r"no cluster 'h200x16'; similar names: h200x\d.*: a100x4, .* or a YAML file"):
        cluster.load("h200x16")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = ["gpu", "node", "switch", "misc", "mem_bw", "mem_capacity", "num_gpus_per_node", "intra_node_bw"]
names += ["num_nics_per_node", "inter_node_bw", "num_gpus_per_rack", "num_nodes_per_leaf", "hop_latency"]
fields = st.sampled_from(names)


@settings(max_examples=40)
@given(st.dictionaries(fields, values | st.dictionaries(fields, values, max_size=4), max_size=4))
def test_no_description_ends_in_another_error(value: dict[str, object]) -> None:
    import yaml

    try:
        found = cluster.parse(yaml.safe_dump(value), "x.yaml")
    except ConfigError:
        return
    assert found.gpus_per_node >= 1
