"""The facts about a host, and the advice that doctor derives from them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from shotcast.hardware import advice, catalog, detect
from shotcast.hardware.advice import Level
from shotcast.hardware.detect import GpuFacts, HostFacts


@pytest.fixture(scope="module")
def host() -> HostFacts:
    return detect.detect()


def test_host(host: HostFacts) -> None:
    assert 1 <= host.cores <= len(os.sched_getaffinity(0)) <= host.cores_installed
    assert 0 < host.memory_available_bytes <= host.memory_bytes
    assert 0 <= host.shm_free_bytes <= host.shm_bytes
    assert host.cpu_model
    assert {"python", "torch", "numba"} <= host.versions.keys()
    assert len(host.peer_access) == len(host.gpus)
    assert json.loads(json.dumps(host.as_json()))["cores"] == host.cores


def test_affinity_counts() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert detect.available_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)


def cgroup(root: Path, membership: str, **files: str) -> float | None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = (
            root
            / "sys/fs/cgroup"
            / name.replace("__", "/")
            .replace("_MAX", ".max")
            .replace("_Q", ".cfs_quota_us")
            .replace("_P", ".cfs_period_us")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return detect.cgroup_quota(root)


def test_cgroup_v2(tmp_path: Path) -> None:
    assert cgroup(tmp_path, "0::/job/task\n", job__task__cpu_MAX="150000 100000\n") == 1.5


def test_cgroup_v2_parent_is_tighter(tmp_path: Path) -> None:
    limits = {"job__task__cpu_MAX": "800000 100000\n", "job__cpu_MAX": "200000 100000\n"}
    assert cgroup(tmp_path, "0::/job/task\n", **limits) == 2.0


def test_cgroup_v2_unlimited(tmp_path: Path) -> None:
    assert cgroup(tmp_path, "0::/\n", cpu_MAX="max 100000\n") is None


def test_cgroup_v1(tmp_path: Path) -> None:
    files = {
        "cpu__job__cpu_Q": "50000\n",
        "cpu__job__cpu_P": "100000\n",
        "cpu__cpu_Q": "-1\n",
        "cpu__cpu_P": "100000\n",
    }
    assert cgroup(tmp_path, "5:memory:/other\n3:cpu,cpuacct:/job\n", **files) == 0.5


def test_no_cgroup(tmp_path: Path) -> None:
    assert detect.cgroup_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text", "off"),
    [
        ("SHOTCAST_MULTICAST", "0", True),
        ("SHOTCAST_MULTICAST", "1", False),
        ("SHOTCAST_MULTICAST", "", True),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", True),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0", False),
    ],
)
def test_who_leaves_multicast_off(monkeypatch: pytest.MonkeyPatch, name: str, text: str, off: bool) -> None:
    monkeypatch.setenv("SHOTCAST_MULTICAST", "1")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setenv(name, text)
    assert detect.multicast_disabled_by() == (name if off else "")


class TestCatalog:
    @pytest.mark.parametrize(
        ("reported", "name"),
        [
            ("NVIDIA H200", "H200 SXM"),
            ("NVIDIA H100 80GB HBM3", "H100 SXM"),
            ("NVIDIA B200", "B200"),
            ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
            ("NVIDIA H100 PCIe", None),
            ("NVIDIA H200 NVL", None),
            ("NVIDIA GB200", None),
            ("NVIDIA A100-SXM4-40GB", None),
            ("NVIDIA L4", None),
        ],
    )
    def test_find(self, reported: str, name: str | None) -> None:
        spec = catalog.find(reported)
        assert (spec.name if spec else None) == name

    def test_figures_are_in_their_units_and_have_sources(self) -> None:
        for spec in catalog.CATALOG:
            assert 40e9 <= spec.memory_bytes <= 400e9
            assert 1000 <= spec.memory_bw_gbps <= 20000
            assert 100 <= spec.link.usable_bw_gbps <= spec.link.paper_bw_gbps <= spec.memory_bw_gbps
            assert 100 <= spec.bf16_tflops <= 5000
            assert "data sheet" in spec.source
            assert "data sheet" in spec.link.source


class TestAdvice:
    def gpus(self, host: HostFacts, count: int, name: str = "NVIDIA H200", **change: object) -> HostFacts:
        gpus = tuple(GpuFacts(i, name, 141 << 30, (9, 0), 132, True) for i in range(count))
        peers = tuple(tuple(True for _ in range(count)) for _ in range(count))
        versions = {**host.versions, "triton": "3.6.0"}
        facts = {"gpus": gpus, "peer_access": peers, "versions": versions, "multicast_disabled_by": "", **change}
        return dataclasses.replace(host, **facts)  # type: ignore[arg-type]

    def texts(self, facts: HostFacts, level: Level) -> str:
        return "\n".join(finding.text for finding in advice.findings(facts) if finding.level is level)

    def test_no_cuda_build(self, host: HostFacts) -> None:
        facts = dataclasses.replace(host, gpus=(), peer_access=(), cuda_runtime="", cuda_error="")
        assert "built without CUDA. Ranks are CPU processes." in self.texts(facts, Level.NOTE)

    def test_cuda_that_does_not_start(self, host: HostFacts) -> None:
        facts = dataclasses.replace(host, gpus=(), peer_access=(), cuda_runtime="13.0", cuda_error="driver too old")
        assert "CUDA does not start: driver too old. Ranks are CPU" in self.texts(facts, Level.NOTE)

    def test_no_driver(self, host: HostFacts) -> None:
        facts = dataclasses.replace(host, gpus=(), peer_access=(), cuda_runtime="13.0", cuda_error="", cuda_driver="")
        assert "There is no NVIDIA driver." in self.texts(facts, Level.NOTE)

    def test_small_shm(self, host: HostFacts) -> None:
        facts = dataclasses.replace(host, shm_bytes=32 << 20, shm_free_bytes=32 << 20)
        assert "has 32 MiB free; 8 CPU ranks need up to 34 MiB" in self.texts(facts, Level.PROBLEM)

    def test_no_shm(self, host: HostFacts) -> None:
        facts = dataclasses.replace(host, shm_bytes=0, shm_free_bytes=0)
        assert "does not exist" in self.texts(facts, Level.PROBLEM)

    def test_cores(self, host: HostFacts) -> None:
        few = dataclasses.replace(host, cores=1, cores_installed=4)
        assert "may use 1 of 4 cores" in self.texts(few, Level.NOTE)
        assert "Beyond one rank, CPU ranks share the 1 core:" in self.texts(few, Level.NOTE)
        many = dataclasses.replace(host, cores=64, cores_installed=64)
        assert "CPU ranks share" not in self.texts(many, Level.NOTE)

    def test_good_node(self, host: HostFacts) -> None:
        facts = self.gpus(host, 8)
        assert "world sizes 2 to 8" in self.texts(facts, Level.GOOD)
        assert "The GPUs offer multicast" in self.texts(facts, Level.GOOD)
        assert "378 GB/s" in self.texts(facts, Level.GOOD)

    def test_multicast_off(self, host: HostFacts) -> None:
        facts = self.gpus(host, 2, multicast_disabled_by="SHOTCAST_MULTICAST")
        assert "which SHOTCAST_MULTICAST leaves off, so peer stores are used" in self.texts(facts, Level.NOTE)

    def test_gpus_apart(self, host: HostFacts) -> None:
        peers = ((True, True, False), (True, True, True), (False, True, True))
        assert "GPUs 0-2 cannot access" in self.texts(self.gpus(host, 3, peer_access=peers), Level.PROBLEM)

    def test_one_gpu_and_too_many(self, host: HostFacts) -> None:
        assert "One GPU has no other" in self.texts(self.gpus(host, 1), Level.NOTE)
        assert "groups of up to 8" in self.texts(self.gpus(host, 16), Level.NOTE)

    def test_no_triton(self, host: HostFacts) -> None:
        facts = self.gpus(host, 2, versions={"torch": "2.13.0"})
        assert "Triton is not installed" in self.texts(facts, Level.PROBLEM)

    def test_unknown_gpu(self, host: HostFacts) -> None:
        assert "Mystery is not in the catalog" in self.texts(self.gpus(host, 2, "Mystery"), Level.NOTE)
