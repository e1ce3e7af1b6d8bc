from __future__ import annotations

import inspect
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shotcast import env
from shotcast.collectives.registry import from_environment
from shotcast.engine.llm import LLM
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn

JOB = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*JOB, "GLOO_SOCKET_IFNAME", "NVSHMEM_LIB_DIR", *re.findall(r"SHOTCAST_\w+", inspect.getsource(env))):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("read", "name", "default", "text", "value"),
    [
        (from_environment, "SHOTCAST_ALGORITHM", "auto", "two_shot", "two_shot"),
        (from_environment, "SHOTCAST_ALGORITHM", "auto", "multimem", "multimem"),
        (env.algorithm_modules, "SHOTCAST_ALGORITHMS", (), "own, /a/b.py", ("own", "/a/b.py")),
        (env.table_paths, "SHOTCAST_TABLE", (), "/a/b.json::/c.json", ("/a/b.json", "/c.json")),
        (env.network, "SHOTCAST_NETWORK", "auto", "nvshmem", "nvshmem"),
        (env.nvshmem_lib_dir, "NVSHMEM_LIB_DIR", "", "/opt/nvshmem/lib", "/opt/nvshmem/lib"),
        (env.cpu_kernels, "SHOTCAST_CPU_KERNELS", "compiled", "interpreter", "interpreter"),
        (env.multicast, "SHOTCAST_MULTICAST", False, "1", True),
        (env.multicast, "SHOTCAST_MULTICAST", False, "True", True),
        (from_environment, "SHOTCAST_ALGORITHM", "auto", "two_shot_fp8", "two_shot_fp8"),
        (env.allow_fp8, "SHOTCAST_ALLOW_FP8", False, "1", True),
        (env.allow_fp8, "SHOTCAST_ALLOW_FP8", False, "false", False),
        (env.batch_invariant, "SHOTCAST_BATCH_INVARIANT", False, "1", True),
        (env.vllm, "SHOTCAST_VLLM", False, "1", True),
        (env.sglang, "SHOTCAST_SGLANG", False, "1", True),
        (env.nvtx, "SHOTCAST_NVTX", False, "1", True),
        (env.share_gpus, "SHOTCAST_SHARE_GPUS", False, "1", True),
        (env.check_vendor, "SHOTCAST_CHECK_VENDOR", True, "0", False),
        (env.shm_dir, "SHOTCAST_SHM_DIR", "/dev/shm", "/mnt/huge", "/mnt/huge"),
        (env.socket_ifname, "SHOTCAST_SOCKET_IFNAME", "", "eth1", "eth1"),
        (env.ranks_per_node, "SHOTCAST_RANKS_PER_NODE", 0, "2", 2),
        (env.secret, "SHOTCAST_SECRET", "", "abc", "abc"),
        (env.port_range, "SHOTCAST_PORT_RANGE", (0, 0), "5000-5099", (5000, 5099)),
        (env.port_range, "SHOTCAST_PORT_RANGE", (0, 0), "5000-5000", (5000, 5000)),
    ],
)
def test_default_and_value(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[], object], name: str, default: object, text: str, value: object
) -> None:
    assert read() == default
    monkeypatch.setenv(name, text)
    assert read() == value


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (from_environment, "SHOTCAST_ALGORITHM"),
        (env.cpu_kernels, "SHOTCAST_CPU_KERNELS"),
        (env.multicast, "SHOTCAST_MULTICAST"),
        (env.allow_fp8, "SHOTCAST_ALLOW_FP8"),
        (env.nvtx, "SHOTCAST_NVTX"),
        (env.share_gpus, "SHOTCAST_SHARE_GPUS"),
        (env.check_vendor, "SHOTCAST_CHECK_VENDOR"),
        (env.port_range, "SHOTCAST_PORT_RANGE"),
    ],
)
def test_unknown_value_is_an_error(monkeypatch: pytest.MonkeyPatch, read: Callable[[], object], name: str) -> None:
    monkeypatch.setenv(name, "sometimes")
    with pytest.raises(ConfigError, match=f"{name}='sometimes' is not accepted; it takes"):
        read()
    monkeypatch.setenv(name, "")
    read()  # empty is unset


@pytest.mark.parametrize("bad", ["5000", "5099-5000", "0-10", "65000-65536", "1-2-3", "-5", "a-b"])
def test_no_port_range(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.setenv("SHOTCAST_PORT_RANGE", bad)
    with pytest.raises(ConfigError, match="is not accepted; it takes FIRST-LAST, from 1 to 65535"):
        env.port_range()


def test_the_interface_that_gloo_was_given_is_the_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1, eth2")
    assert env.socket_ifname() == "eth1"
    monkeypatch.setenv("SHOTCAST_SOCKET_IFNAME", "ib0")
    assert env.socket_ifname() == "ib0"


class TestJob:
    def test_none_outside_a_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert env.job() is None
        monkeypatch.setenv("MASTER_ADDR", "elsewhere")
        assert env.job() is None

    def test_complete(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, text in JOB.items():
            monkeypatch.setenv(name, text)
        assert env.job() == env.JobEnv(rank=1, world_size=4, local_rank=0)
        monkeypatch.delenv("LOCAL_RANK")
        assert env.job() == env.JobEnv(rank=1, world_size=4, local_rank=1)

    @pytest.mark.parametrize("absent", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
    def test_incomplete_says_what_is_absent(self, monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
        for name, text in JOB.items():
            if name != absent:
                monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"incomplete: {absent} not set"):
            env.job()
        assert env.whole_job() is None

    @pytest.mark.parametrize("bad", [{"RANK": "4"}, {"RANK": "-1"}, {"RANK": "one"}, {"WORLD_SIZE": "0"}])
    def test_nonsense(self, monkeypatch: pytest.MonkeyPatch, bad: dict[str, str]) -> None:
        for name, text in {**JOB, **bad}.items():
            monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError):
            env.job()


def test_no_other_module_reads_our_variables() -> None:
    source = Path(env.__file__).parent
    readers = {
        file.relative_to(source).as_posix()
        for file in source.rglob("*.py")
        if re.search(r"(os\.environ|getenv)[^\n]*SHOTCAST_", file.read_text())
    }
    assert readers == {"env.py"}


@pytest.mark.parametrize("start", [lambda: LLM("random:llama-3.2-1b"), lambda: spawn(print, 1)])
def test_a_folder_too_long_for_sockets_is_named(monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]) -> None:
    # a socket in it has a path of 107 bytes: the longest that Linux takes
    longest = "/" + "x" * 74
    monkeypatch.setattr(tempfile, "tempdir", longest)
    assert env.socket_dir() == longest
    with socket.socket(socket.AF_UNIX) as server, pytest.raises(FileNotFoundError):
        server.bind(f"{longest}/pymp-12345678/listener-12345678")
    monkeypatch.setattr(tempfile, "tempdir", longest + "x")
    with pytest.raises(
        ConfigError, match=r"/x+, a path that is too long for sockets; set TMPDIR to a path of at most 75 bytes"
    ):
        start()
