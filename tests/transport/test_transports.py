"""A transport that is added from outside carries the calls of a communicator; nobody compares names of transports."""

from __future__ import annotations

import ast
import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loopback
import numpy as np
import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast.collectives import registry as algorithms
from shotcast.collectives.algorithm import Form
from shotcast.errors import CollectiveMismatch, CollectiveTimeout
from shotcast.memory.host_group import Rendezvous
from shotcast.transport import registry
from shotcast.transport.registry import TRANSPORTS, find, usual

SOURCE = Path(shotcast.__file__).parent
RANKS = 3


# --- a transport of our own -------------------------------------------------------------------------------------------


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the transport of threads, and its algorithm, for a test."""
    monkeypatch.setattr(registry, "_added", [])
    monkeypatch.setattr(algorithms, "_added", [])
    registry.register(loopback.LOOPBACK)
    algorithms.register_algorithm(loopback.DIRECT)
    yield
    assert not loopback._hubs, "closed communicators leave nothing"


def on_threads(run: Callable[[shotcast.Communicator], Any]) -> list[Any]:
    """Return what ``run`` returns or raises on each rank of a communicator, a thread each."""
    store, name, done = dist.HashStore(), uuid.uuid4().hex, [None] * RANKS

    def rank_of(rank: int) -> None:
        try:
            meeting = Rendezvous(store, rank, RANKS, name)
            with shotcast.Communicator.from_store(meeting, "cpu", timeout_s=100) as comm:
                done[rank] = run(comm)
        except BaseException as error:
            done[rank] = error  # type: ignore[call-overload]

    ranks = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(300)
    assert not any(one.is_alive() for one in ranks)
    return done


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(100 * torch.randn(1001, generator=generator)).to(dtype) for _ in range(RANKS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_on_threads(threads: None, dtype: torch.dtype) -> None:
    xs = inputs(dtype)

    def run(comm: shotcast.Communicator) -> Any:
        x = xs[comm.rank].clone()
        total, parts = comm.all_reduce(x), comm.all_gather(x)
        again = [comm.all_reduce(x).clone() for _ in range(3)]  # also by prepared calls
        assert all(torch.equal(one, total) for one in again)
        assert torch.equal(comm.all_reduce(x, out=x), total), "in place"
        return total, parts, comm.explain(x).algorithm, comm.topology.transport.name, repr(comm)

    expected = np.sum([x.double().numpy() for x in xs], axis=0)
    for total, parts, algorithm, transport, shown in on_threads(run):
        np.testing.assert_allclose(total.double().numpy(), expected, rtol=8e-3 if dtype is torch.bfloat16 else 1e-5)
        assert torch.equal(parts, torch.stack(xs).view(-1))
        assert (algorithm, transport) == ("direct", "loopback")
        assert "loopback" in shown


def test_what_no_kernel_serves_goes_to_the_library(threads: None) -> None:
    def run(comm: shotcast.Communicator) -> Any:
        explained = comm.explain(torch.ones(12), "reduce_scatter")
        comm.barrier()
        out = comm.reduce_scatter(torch.arange(6.0) + comm.rank)
        return explained.by_library, "ring does not run on threads" in explained.reason, out.tolist()

    for rank, found in enumerate(on_threads(run)):
        assert found == (True, True, [3.0 + 6 * rank, 6.0 + 6 * rank])


def test_faults_on_threads(threads: None) -> None:
    """A rank that makes another call, and one that does not come, are named; a reset makes the ranks ready again."""

    def run(comm: shotcast.Communicator) -> Any:
        found: list[Any] = []
        comm.all_reduce(torch.ones(4))
        with pytest.raises(CollectiveMismatch) as differs:
            comm.all_reduce(torch.ones(4 + comm.rank // 2))
        found.append(differs.value.differing)
        comm.reset()
        if comm.rank != 1:
            comm.set_timeout(2)
            with pytest.raises(CollectiveTimeout) as late:
                comm.all_reduce(torch.ones(4))
            found.append(late.value.missing)
            comm.set_timeout(100)
        comm.reset()
        return found, comm.all_reduce(torch.ones(4)).tolist()

    for rank, (found, total) in enumerate(on_threads(run)):
        assert [list(ranks) for ranks in found] == ([[2]] if rank == 1 else [[2], [1]])
        assert total == [3.0] * 4


# --- the built-in ones ------------------------------------------------------------------------------------------------


PLACES = (("cuda", 1), ("cuda", 2), ("cpu", 1), ("cpu", 2))


def test_which_transport_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(find(device, nodes).name, find(device, nodes).field) for device, nodes in PLACES]
    assert names == [("triton", "triton"), ("triton", "triton"), ("compiled", "cpu"), ("compiled", "hosts")]
    assert [find(*place) for place in PLACES] == [usual(*place) for place in PLACES]
    monkeypatch.setenv("SHOTCAST_CPU_KERNELS", "interpreter")
    assert [find("cpu", nodes).name for nodes in (1, 2)] == ["interpreter", "interpreter"]
    assert usual("cpu").name == "compiled", "whatever this process asks for"
    assert find("cuda").name == "triton"


def test_forms_have_the_fields_that_transports_name() -> None:
    known = {one.name for one in dataclasses.fields(Form)}
    assert {one.field for one in TRANSPORTS} <= known


# --- nobody compares names --------------------------------------------------------------------------------------------

FOLDERS = {
    "compiled": "transport/cpu/",
    "interpreter": "transport/triton/",
    "nvshmem": "transport/triton/",
    "peer stores": "transport/triton/",
    "tcp": "transport/network/",
    "triton": "transport/triton/",
}
"""The names of transports and of networks, and where each is at home."""
OBJECTS = ("COMPILED", "GPUS", "HOSTS", "INTERPRETER", "NO_TRANSPORT")
PACKAGES = (("hardware/advice.py", "triton"), ("hardware/detect.py", "triton"), ("hardware/detect.py", "nvshmem"))
PACKAGES += (("bench/report.py", "triton"),)
"""Names of packages, of which these modules list the versions."""


def compared(node: ast.AST) -> list[ast.expr]:
    """Return what a piece of code compares with something: also keys of a table, and cases of a match."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        inside = [side.elts for side in sides if isinstance(side, ast.Tuple | ast.List | ast.Set)]
        return sides + [one for elements in inside for one in elements]
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.args if node.func.attr in ("__eq__", "endswith", "find", "get", "index", "startswith") else []
    return []


def comparisons(root: Path) -> list[str]:
    """Return where a name of a transport or a network, or the object itself, is compared outside its folder."""
    found = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        tree = ast.parse(file.read_text())
        objects = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shotcast.transport")
            for alias in node.names
            if alias.name in OBJECTS
        }
        for node in ast.walk(tree):
            for one in compared(node):
                if isinstance(one, ast.Constant) and one.value in FOLDERS:
                    known = path.startswith(FOLDERS[one.value]) or (path, one.value) in PACKAGES
                elif isinstance(one, ast.Attribute) and one.attr in ("name", "field"):
                    known = ast.unparse(one.value).rpartition(".")[2] not in ("transport", "network")
                else:
                    known = not (isinstance(one, ast.Name) and one.id in objects)
                if not known:
                    found.append(f"{path}:{one.lineno} compares {ast.unparse(one)}")
    return found


def test_nobody_compares_names() -> None:
    assert comparisons(SOURCE) == []
    assert {one.name for one in TRANSPORTS} <= FOLDERS.keys()


@pytest.mark.parametrize(
    "code",
    [
        "topology.transport.name == 'triton'",
        "kernels in ('triton', 'interpreter')",
        "'nvshmem' in network",
        "if 'compiled' != kernels: pass",
        "topology.network.name == other",
        "x = a < topology.transport.field",
        "match kernels:\n    case 'tcp':\n        pass",
        "{'compiled': cpu, 'hosts': hosts}.get(kernels, triton)",
        "named.get('peer stores')",
        "from shotcast.transport.cpu import COMPILED\ntransport is COMPILED",
        "from shotcast.transport.triton import GPUS as ours\ntransport in (ours,)",
    ],
)
def test_a_planted_comparison_is_found(tmp_path: Path, code: str) -> None:
    for folder in ("collectives", "transport/cpu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "collectives" / "planted.py").write_text(code)
    (tmp_path / "transport" / "cpu" / "own.py").write_text("kernels == 'compiled'\nmodel.name == device\n")
    assert {one.partition(":")[0] for one in comparisons(tmp_path)} == {"collectives/planted.py"}
