"""The machine at hand as a cluster, and which calibration prices it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shotcast.errors import ConfigError
from shotcast.hardware import catalog, detect
from shotcast.hardware.detect import GpuFacts
from shotcast.planner.calibration import load
from shotcast.planner.machine import calibration_of, cluster_of_gpus, this_machine

CPU = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu" / "calibration_x1.json"
PACKAGED = load("NVIDIA H200")


def gpu(name: str) -> catalog.GpuSpec:
    return next(spec for spec in catalog.CATALOG if spec.name == name)


def file_of(tmp_path: Path, part: str) -> Path:
    """Write a calibration of a GPU that differs from the packaged one by its part."""
    file = tmp_path / "own.json"
    file.write_text(PACKAGED.as_json().replace("NVIDIA H200", part, 1))
    return file


def test_calibrations_by_their_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOTCAST_CALIBRATION", raising=False)
    assert calibration_of(gpu("H200 SXM")) == PACKAGED
    assert calibration_of(gpu("H100 SXM")) == load("NVIDIA H100 80GB HBM3")
    assert calibration_of(gpu("B200")) == PACKAGED  # which a plan scales
    own = file_of(tmp_path, "NVIDIA B200")
    monkeypatch.setenv("SHOTCAST_CALIBRATION", str(own))
    assert calibration_of(gpu("B200")).part == "NVIDIA B200"
    assert calibration_of(gpu("H200 SXM")) == PACKAGED  # that of another part is passed over
    assert calibration_of(gpu("H200 SXM"), own).part == "NVIDIA B200"  # unless it is asked for
    monkeypatch.setenv("SHOTCAST_CALIBRATION", str(CPU))
    assert calibration_of(gpu("H200 SXM")) == PACKAGED
    monkeypatch.setenv("SHOTCAST_CALIBRATION", str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"cannot read the calibration .*absent.json"):
        calibration_of(gpu("H200 SXM"))


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [GpuFacts(index, "NVIDIA H200", 150109880320, (9, 0), 132, None) for index in range(4)]
    monkeypatch.setattr(detect, "visible_gpus", lambda: tuple(gpus))
    found = this_machine()
    assert (found.gpu, found.gpus_per_node, found.network) == (gpu("H200 SXM"), 4, None)
    monkeypatch.setattr(detect, "visible_gpus", lambda: ())
    with pytest.raises(ConfigError, match="this machine has no GPU that PyTorch sees; name a cluster"):
        this_machine()


def test_every_gpu_of_the_catalog_has_a_network_between_hosts() -> None:
    names = {"A100 SXM 80 GB": "NVIDIA A100-SXM4-80GB", "H100 SXM": "NVIDIA H100 80GB HBM3"}
    for spec in catalog.CATALOG:
        found = cluster_of_gpus([names.get(spec.name, f"NVIDIA {spec.name}")] * 4, 4, 2)
        assert (found.gpu, found.gpus_per_node, found.nodes) == (spec, 4, 2)
        assert found.network is not None
    slingshot = cluster_of_gpus(["NVIDIA A100-SXM4-80GB"], 4, 2).network
    assert slingshot is not None
    assert slingshot.name == "Slingshot-11"  # of the description with as many GPUs a node
