"""The plug-ins of vLLM and SGLang, on CPU ranks, against the real signatures of the versions they serve."""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import plugin_targets as targets
import pytest
import read_hosts
from fake_hosts import HOSTS, write_host

import shotcast
from shotcast.integrations import sglang, vllm

VLLM = [host for host in HOSTS if host.startswith("vllm")]
SGLANG = [host for host in HOSTS if host.startswith("sglang")]


def run(fn: Any, ranks: int, *args: Any, **env: str) -> list[Any]:
    return shotcast.spawn(fn, ranks, *args, env=env, timeout_s=300)


def changed(host: str, module: str, name: str, parameters: str | None) -> dict[str, Any]:
    """Return the modules of a host program in which a function has other parameters, or is missing (None)."""
    modules = copy.deepcopy(HOSTS[host]["modules"])
    *path, last = name.split(".")
    names = modules[module]
    for one in path:
        names = names[one]["members"]
    if parameters is None:
        del names[last]
    else:
        names[last]["parameters"] = parameters
    return modules


class TestVllm:
    def test_versions(self) -> None:
        assert VLLM == ["vllm 0.24.0", "vllm 0.33.0"]

    @pytest.mark.parametrize("host", VLLM)
    def test_sums_of_tensor_parallel_groups(self, host: str, tmp_path: Path) -> None:
        write_host(tmp_path, host)
        for logged in run(targets.vllm, 2, str(tmp_path), SHOTCAST_VLLM="1"):
            assert logged[0].startswith("shotcast serves group tp:0 of vLLM: Communicator(")
            assert logged[1].startswith("fuse_allreduce_rms is off, as its kernel would bypass")

    @pytest.mark.parametrize("name", ["VLLM_BATCH_INVARIANT", "SHOTCAST_BATCH_INVARIANT"])
    def test_batch_invariant(self, name: str, tmp_path: Path) -> None:
        write_host(tmp_path, VLLM[-1])
        explained = run(targets.vllm_batch_invariant, 2, str(tmp_path), **{"SHOTCAST_VLLM": "1", name: "1"})
        assert "batch-invariant" in explained[0]

    @pytest.mark.parametrize("bias", ["bias", "offset"])
    def test_linear_layers_of_the_batch_invariant_mode(self, bias: str, tmp_path: Path) -> None:
        write_host(tmp_path, VLLM[-1])
        layers = tmp_path / "vllm" / "model_executor" / "layers"
        layers.mkdir(parents=True)
        own = f"def linear_batch_invariant(input, weight, {bias}=None):"
        body = f"return torch.nn.functional.linear(input, weight, {bias})"
        (layers / "batch_invariant.py").write_text(f"import torch\n{own}\n    {body}\n")
        for name in targets.LINEAR_USERS:
            imported = "from vllm.model_executor.layers.batch_invariant import linear_batch_invariant\n"
            (layers / f"{name}.py").write_text(imported)
        for logged in run(targets.vllm_linear, 2, str(tmp_path), SHOTCAST_VLLM="1", VLLM_BATCH_INVARIANT="1"):
            (said,) = (line for line in logged if line.startswith("vLLM computes"))
            if bias == "bias":
                assert said.startswith("vLLM computes layers of (7, 32, torch.float32")
            else:
                assert said == (
                    "vLLM computes the linear layers of its batch-invariant mode: "
                    "vllm.model_executor.layers.batch_invariant has no linear_batch_invariant(input, weight, bias)"
                )

    def test_elastic_groups_are_vllms(self, tmp_path: Path) -> None:
        write_host(tmp_path, VLLM[-1])
        logged = run(targets.vllm_elastic, 2, str(tmp_path), SHOTCAST_VLLM="1")[0]
        why = "elastic expert parallelism compares the class of its communicators"
        assert logged == [f"the all-reduce of vLLM itself serves group tp: {why}"] * 2

    @pytest.mark.full
    def test_a_group_without_a_communicator_is_vllms(self, tmp_path: Path) -> None:
        write_host(tmp_path, VLLM[-1])
        for first, *others in run(targets.vllm_without_kernels, 2, str(tmp_path), SHOTCAST_VLLM="1"):
            text = "the all-reduce of vLLM itself serves group tp:{}: "
            assert first.startswith(text.format(0) + "ranks 0, 1: ConfigError: the ranks do not agree")
            assert others == [text.format(number) + "rank 1: OSError: no space left" for number in (1, 2)]

    def test_it_is_off_unless_it_is_asked_for(self, tmp_path: Path) -> None:
        write_host(tmp_path, VLLM[-1])
        for logged, path in run(targets.vllm_untouched, 2, str(tmp_path)):
            assert logged == []
            assert path.startswith("vllm.")

    CASES = (
        ("0.23.1", None, "vLLM 0.23.1 is not served; from 0.24 to below 0.34 is"),
        ("0.34.0", None, "vLLM 0.34.0 is not served"),
        (
            "",
            (vllm.COMMUNICATOR, "CudaCommunicator.all_reduce", "self, input_, out"),
            f"{vllm.COMMUNICATOR}.CudaCommunicator.all_reduce takes (self, input_, out), not (self, input_)",
        ),
        (
            "",
            (vllm.COMMUNICATOR, "CudaCommunicator.__init__", "self, group, device"),
            "takes (self, group, device), not (self, cpu_group, device, device_group, unique_name, ...)",
        ),
        ("", ("vllm.config.parallel", "ParallelConfig.enable_elastic_ep", None), "there is no vllm.config.parallel.P"),
    )

    @pytest.mark.parametrize(("version", "change", "text"), CASES)
    def test_what_is_refused_leaves_vllm_untouched(
        self, version: str, change: tuple[str, str, str | None] | None, text: str, tmp_path: Path
    ) -> None:
        host = VLLM[-1]
        write_host(tmp_path, host, version, changed(host, *change) if change else None)
        logged, path = run(targets.vllm_untouched, 1, str(tmp_path), SHOTCAST_VLLM="1")[0]
        assert logged
        for line in logged:
            assert line.startswith("the plug-in of shotcast is off, and vLLM as without it: ")
            assert text in line
        assert path.startswith("vllm.")

    def test_a_platform_that_cannot_be_extended_stays(self, tmp_path: Path) -> None:
        footers = {"vllm.platforms.cuda": "CudaPlatform.__init_subclass__ = None"}
        write_host(tmp_path, VLLM[-1], footers_of=footers)
        logged, path = run(targets.vllm_untouched, 1, str(tmp_path), SHOTCAST_VLLM="1")[0]
        assert logged[0].startswith("the plug-in of shotcast is off, and vLLM as without it: 'NoneType' object is not")
        assert path.startswith("vllm.")

    def test_a_communicator_that_cannot_be_extended_serves_itself(self, tmp_path: Path) -> None:
        footers = {vllm.COMMUNICATOR: "CudaCommunicator.__init_subclass__ = None"}
        write_host(tmp_path, VLLM[-1], footers_of=footers)
        logged = run(targets.vllm_own_class, 1, str(tmp_path), SHOTCAST_VLLM="1")[0]
        assert [line.split(":")[0] for line in logged] == ["the all-reduce of vLLM itself serves group tp"]


class TestSglang:
    def test_versions(self) -> None:
        assert SGLANG == ["sglang 0.5.23"]

    @pytest.mark.every(2)
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_sums_and_norms_of_tensor_parallel_groups(self, deterministic: bool, tmp_path: Path) -> None:
        write_host(tmp_path, SGLANG[-1])
        mode = " in batch-invariant mode" if deterministic else ""
        for logged in run(targets.sglang, 2, str(tmp_path), deterministic, SHOTCAST_SGLANG="1"):
            assert len(logged) == 2
            for line, name in zip(logged, ("tp:0", "attention_tp:0"), strict=True):
                assert line.startswith(f"shotcast serves group {name} of SGLang{mode}: Communicator(")

    def test_it_is_off_unless_it_is_asked_for(self, tmp_path: Path) -> None:
        write_host(tmp_path, SGLANG[-1])
        assert run(targets.sglang_untouched, 1, str(tmp_path)) == [[]]

    CASES = (
        ("0.5.24", None, "SGLang 0.5.24 is not served; from 0.5.23 to below 0.5.24 is"),
        (
            "",
            (sglang.GROUPS, "GroupCoordinator._can_use_flashinfer_allreduce", "self, input_, more"),
            "takes (self, input_, more), not (self, input_)",
        ),
        ("", (sglang.GROUPS, "GroupCoordinator.destroy", None), "there is no"),
    )

    @pytest.mark.parametrize(("version", "change", "text"), CASES)
    def test_what_is_refused_leaves_sglang_untouched(
        self, version: str, change: tuple[str, str, str | None] | None, text: str, tmp_path: Path
    ) -> None:
        host = SGLANG[-1]
        write_host(tmp_path, host, version, changed(host, *change) if change else None)
        ((line,),) = run(targets.sglang_untouched, 1, str(tmp_path), SHOTCAST_SGLANG="1")
        assert line.startswith("the plug-in of shotcast is off, and SGLang as without it: ")
        assert text in line


class TestObstacle:
    """The reasons that ``shotcast doctor`` gives for a plug-in that is off."""

    def test_in_turn(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("SHOTCAST_VLLM", "SHOTCAST_SGLANG", "VLLM_PLUGINS", "SGLANG_PLUGINS"):
            monkeypatch.delenv(name, raising=False)
        write_host(tmp_path / "vllm", VLLM[0])
        write_host(tmp_path / "sglang", SGLANG[0])
        assert (vllm.unsupported_reason(), sglang.unsupported_reason()) == (
            "SHOTCAST_VLLM is not 1",
            "SHOTCAST_SGLANG is not 1",
        )
        monkeypatch.setenv("SHOTCAST_VLLM", "1")
        monkeypatch.setenv("SHOTCAST_SGLANG", "1")
        assert (vllm.unsupported_reason(), sglang.unsupported_reason()) == (
            "vLLM is not installed",
            "SGLang is not installed",
        )
        monkeypatch.syspath_prepend(str(tmp_path / "vllm"))
        monkeypatch.syspath_prepend(str(tmp_path / "sglang"))
        assert (vllm.unsupported_reason(), sglang.unsupported_reason()) == ("", "")
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
        assert vllm.unsupported_reason() == "VLLM_PLUGINS=other leaves it out"
        assert sglang.unsupported_reason() == "SGLANG_PLUGINS=other, another leaves it out"
        monkeypatch.setenv("SHOTCAST_VLLM", "maybe")
        assert "SHOTCAST_VLLM='maybe' is not accepted" in vllm.unsupported_reason()
        assert not {name.split(".")[0] for name in sys.modules} & {"vllm", "sglang"}


def test_the_file_of_signatures_is_read_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel made of the package of a test gives the same entry of the file as the wheel that it was read from."""
    folder = tmp_path / "package"
    write_host(folder, VLLM[-1])
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in folder.rglob("*"):
            if "shotcast" not in str(file.relative_to(folder)):
                archive.write(file, file.relative_to(folder))
    monkeypatch.setattr(read_hosts, "HOSTS", tmp_path / "hosts.json")
    monkeypatch.setattr(sys, "argv", ["read_hosts.py", str(wheel)])
    read_hosts.main()
    host, read = read_hosts.read(wheel)
    assert (host, read["modules"]) == (VLLM[-1], HOSTS[VLLM[-1]]["modules"])
    assert (tmp_path / "hosts.json").read_text().startswith('{\n "vllm 0.33.0"')


def test_entry_points_are_light() -> None:
    """A host program loads them in every process, whether they are asked for or not."""
    code = """
import sys
import shotcast.integrations.vllm, shotcast.integrations.sglang
assert shotcast.integrations.vllm.register() is None
shotcast.integrations.sglang.register()
print([name for name in ("torch", "numpy", "numba", "triton") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"
