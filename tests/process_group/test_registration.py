"""PyTorch learns of the backend at ``import torch``, which must neither fail nor take long."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

import entry_points
from shotcast.process_group import registration
from shotcast.process_group.group import ShotcastProcessGroup

OF_2_11 = (
    *("_allgather_base", "_end_coalescing", "_reduce_scatter_base", "_start_coalescing", "abort", "allgather"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send", "set_timeout", "shutdown", "split_group"),
)
OF_2_13 = (
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "reduce_scatter_single"),
    "reduce_scatter_single_coalesced",
)


@pytest.mark.full
def test_a_script_that_knows_nothing_of_us(tmp_path: Path) -> None:
    script = """
        import sys
        import torch
        assert torch.distributed.is_backend_available("shotcast")
        assert not [name for name in sys.modules if name.startswith("shotcast.collectives")]
        torch.distributed.init_process_group("shotcast", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        x = torch.ones(3)
        torch.distributed.all_reduce(x)
        assert x.tolist() == [1.0] * 3
        torch.distributed.destroy_process_group()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, env=entry_points.environment(tmp_path), check=True, timeout=300)


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("imported", ["after the group", pytest.param("before the group", marks=pytest.mark.full)])
def test_dynamo_traces_the_group_as_one(imported: str, tmp_path: Path) -> None:
    """PyTorch 2.11's takes its own class alone for a group, and is told of ours whenever it is imported."""
    script = f"""
        import sys
        import torch
        import torch.distributed as dist
        import torch.distributed._functional_collectives as funcol
        if {imported == "before the group"}:
            import torch._dynamo
        dist.init_process_group("shotcast", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        assert ("torch._dynamo" in sys.modules) == {imported == "before the group"}

        @torch.compile(fullgraph=True, backend="eager")
        def step(x, group):
            return funcol.all_reduce(x + dist.get_world_size(group) + dist.get_rank(group), "sum", group)

        assert step(torch.zeros(3), dist.group.WORLD).tolist() == [1.0] * 3
        dist.destroy_process_group()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, env=entry_points.environment(tmp_path), check=True, timeout=300)


def test_a_script_that_destroys_nothing_ends(tmp_path: Path) -> None:
    script = """
        import torch
        import torch.distributed as dist
        dist.init_process_group("shotcast", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        x = torch.ones(3)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        group = dist.new_group()
        dist.all_reduce(x, group=group)
        print(x.tolist())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(
        command, env=entry_points.environment(tmp_path), check=True, timeout=300, capture_output=True, text=True
    )
    assert ended.stdout == "[1.0, 1.0, 1.0]\n"


def test_registering_twice_and_in_vain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    registration.register()
    registration.register()
    assert dist.Backend.backend_list.count("shotcast") == 1
    assert dist.Backend.backend_capability["shotcast"] == ["cpu", "cuda"]
    monkeypatch.setattr(dist, "is_available", lambda: False)
    registration.register()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("another release")

    monkeypatch.undo()
    monkeypatch.setattr(dist.Backend, "register_backend", fail)
    registration.register()
    assert "is not there" in caplog.text


def test_the_group_has_the_names_of_several_releases() -> None:
    inherited = [name for name in OF_2_11 + OF_2_13 if name not in dir(ShotcastProcessGroup)]
    assert inherited == []
    for name in OF_2_11 + OF_2_13:
        owner = next(kind for kind in ShotcastProcessGroup.__mro__ if name in vars(kind))
        assert owner.__module__.startswith("shotcast."), name
