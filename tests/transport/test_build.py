"""Construction of the executor of GPU ranks, on a machine without GPUs: the tests replace all that touches a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shotcast import extras
from shotcast.collectives.nodes import Nodes
from shotcast.collectives.registry import registered
from shotcast.cost.collective import INFINIBAND, NVLINK4, NetworkCost
from shotcast.errors import ConfigError
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory import arena
from shotcast.transport.registry import build_executor, find
from shotcast.transport.transport import NO_NETWORK, NO_TRANSPORT, Built, Network, Ranks
from shotcast.transport.triton import (
    GPUS,
    build,
    hosts,  # before the fixture replaces what it derives from
)
from shotcast.transport.triton.layout import WorkspaceLayout

GPU = torch.device("cuda", 1)
ONE_NODE = Nodes(NodeLayout.one_node(2), True)


class TwoRanks:
    """A host group of two ranks. The other rank reports what this one does, except for its GPU and its multicast."""

    world_size, order, name = 2, (0, 1), "two"

    def __init__(
        self, others_unsupported_reason: str = "", others_multicast: bool = True, rank: int = 1, others_number: int = 0
    ):
        self.rank, self.others_number = rank, others_number
        self.others_unsupported_reason = others_unsupported_reason
        self.others_multicast = others_multicast

    def all_gather(self, value: Any, timeout_s: float | None = None, what: str = "") -> list[Any]:
        if isinstance(value, tuple) and len(value) == 4:  # what the arena offers
            return [("other", "other/0", {}, True), value]
        if isinstance(value, tuple):
            return [("GPU-0", self.others_number), value]
        if isinstance(value, bool):
            return [self.others_multicast, value]
        return [self.others_unsupported_reason, value]


class Buffer:
    """Symmetric memory with a multicast address."""

    addresses, multicast_address = (1 << 20, 1 << 30), 1 << 40

    def __init__(self, group: Any, nbytes: int, device: torch.device, repeated: bool):
        self.nbytes = nbytes
        built["buffer"] = device, repeated

    def view(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def close(self) -> None:
        pass


built: dict[str, tuple[Any, ...]] = {}


ALGORITHMS = registered()


def ranks_of(host: Any, nodes: Nodes, device: torch.device) -> Ranks:
    return Ranks(host, nodes.layout, nodes.one_host, device, 1 << 20, 3.0, ALGORITHMS, print, print, False)


def made_for(host: Any, nodes: Nodes, device: torch.device) -> Built:
    """Return what is built for the ranks of a communicator, by the transport of GPUs or for none."""
    transport, made = build_executor(find(device.type, nodes.layout.nodes), ranks_of(host, nodes, device))
    assert transport is (NO_TRANSPORT if made.executor is None else GPUS)
    return made


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    built.clear()
    process = arena.Process()

    def executor(ranks: Ranks, lease: Any, nodes: int) -> Any:
        built["executor"] = ranks, nodes
        memory = lease(WorkspaceLayout.for_messages(ranks.max_bytes).nbytes)
        return SimpleNamespace(memory=memory, multicast=bool(memory.multicast_address))

    monkeypatch.setattr("shotcast.memory.cuda.CudaBuffer", Buffer)
    monkeypatch.setattr("shotcast.transport.triton.executor.TritonExecutor", executor)
    monkeypatch.setattr(arena, "_process", process)
    monkeypatch.setenv("SHOTCAST_MULTICAST", "1")
    factory = "shotcast.transport.triton.build"
    monkeypatch.setattr(f"{factory}.uuid_of", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(f"{factory}.visible_gpus", lambda: {"GPU-0": 0, "GPU-1": 1})
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    yield
    process.notice.forget()  # its memory is released only by a wait for a GPU


def test_gpus_with_peer_access() -> None:
    host: Any = TwoRanks()
    made = made_for(host, ONE_NODE, GPU)
    assert made[1:] == ("", True, NO_NETWORK)
    assert built["buffer"] == (GPU, False)
    assert built["executor"] == (ranks_of(host, ONE_NODE, GPU), 1)
    assert arena.held()[str(GPU)].leased > WorkspaceLayout.for_messages(1 << 20).nbytes


def test_gpus_older_than_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    built_executor = made_for(TwoRanks(), ONE_NODE, GPU)
    assert (
        built_executor.unsupported_reason
        == "rank 1: kernels need compute capability 8.0, as Triton does, and GPU 1 has 7.5"
    )
    assert not built


def test_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    both = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"ranks 0, 1 use one GPU, GPU-0: .*SHOTCAST_SHARE_GPUS=1"):
        made_for(TwoRanks(), ONE_NODE, both)
    assert not built
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    assert made_for(TwoRanks(), ONE_NODE, both).executor is not None
    assert built["buffer"][-1] is True
    made_for(TwoRanks(), ONE_NODE, GPU)
    assert built["buffer"][-1] is False, "these have one each"


def test_one_gpu_under_two_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with other orders in CUDA_VISIBLE_DEVICES share a GPU, although their numbers differ."""
    monkeypatch.setattr("shotcast.transport.triton.build.uuid_of", lambda device: "GPU-0")
    with pytest.raises(ConfigError, match="ranks 0, 1 use one GPU, GPU-0"):
        made_for(TwoRanks(), ONE_NODE, GPU)
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    made_for(TwoRanks(), ONE_NODE, GPU)
    assert built["buffer"][-1] is True


def one_visible(monkeypatch: pytest.MonkeyPatch, access: bool | None) -> str:
    """Build where this rank sees GPU-1 alone, as number 0, and NVML says ``access``. Return the reason."""
    factory = "shotcast.transport.triton.build"
    monkeypatch.setattr(f"{factory}.uuid_of", lambda device: "GPU-1")
    monkeypatch.setattr(f"{factory}.visible_gpus", lambda: {"GPU-1": 0})
    monkeypatch.setattr(f"{factory}.nvml.peer_access", lambda *gpus: access if gpus == ("GPU-1", "GPU-0") else None)
    made = made_for(TwoRanks(), ONE_NODE, torch.device("cuda", 0))
    return made.unsupported_reason


def test_gpus_that_their_processes_see_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one visible GPU a rank, all have the number 0; they are not one GPU, and PyTorch has to be told so."""
    assert one_visible(monkeypatch, True) == ""
    assert built["buffer"] == (torch.device("cuda", 0), True)


def test_a_hidden_gpu_without_access(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_visible(monkeypatch, False) == "rank 1: GPU 0 has no peer access to the GPU of rank 0, GPU-0"
    assert not built


def test_a_gpu_that_nothing_here_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_visible(monkeypatch, None) == (
        "rank 1: this process does not see the GPU of rank 0, GPU-0, and NVML knows nothing of it: a container hides it"
    )


def test_logical_nodes_are_joined_by_peer_stores() -> None:
    layout = NodeLayout.of_keys(["a/0", "a/1"])
    made = made_for(TwoRanks(), ONE_NODE._replace(layout=layout), GPU)
    assert made[1:] == ("", True, Network("peer stores", NetworkCost(NVLINK4.step_us, NVLINK4.bw_gbps)))


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the machine have NVSHMEM, and replace the executor that uses it."""
    for name in ("libnvshmem_host.so.3", "libnvshmem_device.bc"):
        (tmp_path / name).touch()
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))

    def executor(ranks: Ranks, lease: Any) -> Any:
        built["executor"] = (ranks,)
        return SimpleNamespace()

    monkeypatch.setattr(hosts, "HostsTritonExecutor", executor)


HOSTS = Nodes(NodeLayout.of_keys(["a", "b"]), False)


def test_gpus_of_several_hosts_put(heap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not see each other's GPUs."""
    monkeypatch.setattr("shotcast.transport.triton.build.visible_gpus", lambda: {"GPU-1": 1})
    host = TwoRanks()
    made = made_for(host, HOSTS, GPU)
    assert made[1:] == ("", False, Network("nvshmem", INFINIBAND, puts=True))
    assert built["executor"] == (ranks_of(host, HOSTS, GPU),)


def test_logical_nodes_put_if_that_is_asked_for(heap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCAST_NETWORK", "nvshmem")
    nodes = HOSTS._replace(one_host=True)
    assert made_for(TwoRanks(), nodes, GPU).network.puts
    assert made_for(TwoRanks(), ONE_NODE, GPU).network == NO_NETWORK


def test_gpus_that_put_are_as_many_as_a_fault_can_name() -> None:
    layout = NodeLayout.of_keys([str(rank // 6) for rank in range(18)])
    host: Any = SimpleNamespace(world_size=18, rank=1)
    unsupported_reason = made_for(host, Nodes(layout, False), GPU).unsupported_reason
    assert unsupported_reason == "native kernels serve up to 16 ranks, not 18"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "rank 1: NVSHMEM, which carries data between GPUs of several nodes, was not found"),
        ("mixed", "rank 1: kernels that put to other hosts take nodes of consecutive ranks"),
        ("refuses", "NVSHMEM has no memory"),
    ],
)
def test_gpus_of_several_hosts_that_cannot_put(
    heap: None, monkeypatch: pytest.MonkeyPatch, change: str, said: str
) -> None:
    nodes = HOSTS
    if change == "missing":
        monkeypatch.setenv("NVSHMEM_LIB_DIR", "/nowhere")
    elif change == "mixed":
        nodes = Nodes(NodeLayout(((1,), (0,)), ("a", "b")), False)
    else:

        def refuse(*args: Any) -> Any:
            raise ConfigError("NVSHMEM has no memory")

        monkeypatch.setattr(hosts, "HostsTritonExecutor", refuse)
    made = made_for(TwoRanks(), nodes, GPU)
    assert made.executor is None
    assert made.unsupported_reason.startswith(said)


@pytest.mark.parametrize(
    ("keys", "unsupported_reason"),
    [
        ("aab", "native kernels serve nodes of equally many ranks, and there are 2 on a, 1 on b"),
        ("a" * 9 + "b" * 9, "native kernels serve up to 8 ranks of a node, not 9"),
        ([str(node) for node in range(65)], "native kernels serve up to 64 nodes, not 65"),
        ([str(rank // 8) for rank in range(1040)], "native kernels serve up to 64 nodes, not 130"),
    ],
)
def test_nodes_that_own_kernels_do_not_serve(keys: Any, unsupported_reason: str) -> None:
    nodes = Nodes(NodeLayout.of_keys(list(keys)), False)
    for device in (GPU, torch.device("cpu")):
        assert made_for(TwoRanks(), nodes, device).unsupported_reason == unsupported_reason


def test_multicast_is_for_all_ranks_or_none() -> None:
    """The choice of algorithm depends on multicast, and all ranks must choose and launch alike."""
    made: Any = made_for(TwoRanks(others_multicast=False), ONE_NODE, GPU)
    assert not made.multicast
    assert made.executor.memory.multicast_address == 0


def test_an_unsupported_reason_of_another_rank_counts_for_all() -> None:
    built_executor = made_for(TwoRanks("Triton is not installed"), ONE_NODE, GPU)
    assert built_executor == (None, "rank 0: Triton is not installed", False, NO_NETWORK)
    assert not built


def test_the_interpreter_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "missing", lambda extra: (extra,))
    with pytest.raises(ConfigError, match=r"^SHOTCAST_CPU_KERNELS=interpreter needs .*'shotcast\[triton\]'$"):
        build.interpreted(ranks_of(TwoRanks(), ONE_NODE, torch.device("cpu")))


def test_an_unsupported_reason_is_said_once_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shotcast.transport.registry._said", set())
    for rank in (1, 0, 0):
        for unsupported_reason in ("no peer access", "too old"):
            made_for(TwoRanks(unsupported_reason, rank=rank), ONE_NODE, GPU)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"the vendor library serves all calls of communicator two: rank 0: {unsupported_reason}")
        for unsupported_reason in ("no peer access", "too old")
    ]


@pytest.mark.parametrize(
    ("one_host", "places"), [(True, [(r, 5) for r in range(5)]), (False, [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)])]
)
def test_ranks_know_their_place_among_those_of_their_host(one_host: bool, places: list[tuple[int, int]]) -> None:
    """Nodes of one host may be logical ones, so the host counts where it has all ranks."""
    layout = NodeLayout.of_keys(["a", "b", "a", "b", "a"])
    for rank, place in enumerate(places):
        group: Any = SimpleNamespace(rank=rank, world_size=5)
        assert Ranks(group, layout, one_host, GPU, 1 << 20, 1.0, registered()).place_on_host == place
