"""Refused inputs: the text of each error, and that the communicator still works afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import bad_input_targets as targets
import pytest

import shotcast
from shotcast import ConfigError
from shotcast.collectives.choice.table import TableRow, render
from shotcast.collectives.registry import registered
from shotcast.wire import LaunchShape, NodeShape


@pytest.mark.parametrize("world_size", [2, 3])
def test_bad_calls_are_refused_and_the_next_good_one_succeeds(world_size: int) -> None:
    assert shotcast.spawn(targets.every_bad_call, world_size, timeout_s=300) == [len(targets.CALLS)] * world_size


def test_closed_communicator_refuses_every_method() -> None:
    shotcast.spawn(targets.calls_after_close, 2, timeout_s=300)


def test_bad_arguments_of_the_communicator() -> None:
    shotcast.spawn(targets.bad_arguments, 2, timeout_s=300)


def test_group_without_this_rank() -> None:
    shotcast.spawn(targets.not_a_member, 2, timeout_s=300)


class TestEnvironment:
    CASES: ClassVar[list[tuple[dict[str, str | None], tuple[str, ...]]]] = [
        (
            {"RANK": None, "WORLD_SIZE": None, "OMPI_COMM_WORLD_SIZE": "4"},
            ("OMPI_COMM_WORLD_SIZE says that 4 processes were started", "torchrun", "shotcast.spawn"),
        ),
        ({"RANK": None, "WORLD_SIZE": None, "SLURM_STEP_NUM_TASKS": "2"}, ("SLURM_STEP_NUM_TASKS says that 2",)),
        ({"WORLD_SIZE": None}, ("incomplete: WORLD_SIZE not set", "torchrun")),
        ({"RANK": None}, ("incomplete: RANK not set",)),
        ({"MASTER_ADDR": None}, ("incomplete: MASTER_ADDR not set",)),
        ({"MASTER_PORT": None}, ("incomplete: MASTER_PORT not set",)),
        ({"RANK": "1"}, ("RANK=1 is not in 0..WORLD_SIZE-1 with WORLD_SIZE=1",)),
        ({"RANK": "one"}, ("RANK='one' is not accepted", "a whole number")),
        ({"WORLD_SIZE": "2.0"}, ("WORLD_SIZE='2.0' is not accepted", "a whole number")),
        (
            {"SHOTCAST_ALGORITHM": "tree"},
            ("SHOTCAST_ALGORITHM='tree' is not accepted", ", ".join(("auto", *registered()))),
        ),
        ({"SHOTCAST_CPU_KERNELS": "fast"}, ("SHOTCAST_CPU_KERNELS='fast'", "compiled or interpreter")),
    ]
    CODE = """
import json, os, sys, shotcast
job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
errors = []
for changes in json.load(sys.stdin):
    os.environ.update(job)
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        shotcast.Communicator(device="cpu")
    except shotcast.ConfigError as error:
        errors.append(str(error))
    else:
        errors.append("")
    for name in changes:
        os.environ.pop(name, None)
print(json.dumps(errors))
"""

    @pytest.mark.full
    def test_missing_wrong_and_inconsistent(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(shotcast.__file__).parents[1])}
        cases = json.dumps([changes for changes, _ in self.CASES])
        command = [sys.executable, "-c", self.CODE]
        done = subprocess.run(command, input=cases, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        for (changes, texts), message in zip(self.CASES, json.loads(done.stdout), strict=True):
            for text in texts:
                assert text in message, (changes, message)


class TestDisagreement:
    """Every rank raises an error, and all errors have the same text."""

    @staticmethod
    def error_of(*args: object) -> str:
        messages = shotcast.spawn(targets.construction_error, 3, *args, timeout_s=300)
        assert messages[0]
        assert messages == [messages[0]] * 3
        return messages[0]

    def test_algorithm(self) -> None:
        message = self.error_of({1: {"SHOTCAST_ALGORITHM": "ring"}})
        assert message == "the ranks do not agree on SHOTCAST_ALGORITHM: rank 0: auto, rank 1: ring, rank 2: auto"

    @pytest.mark.full
    def test_allow_fp8(self) -> None:
        message = self.error_of({1: {"SHOTCAST_ALLOW_FP8": "1"}})
        words = "the ranks do not agree on allow_fp8 (SHOTCAST_ALLOW_FP8): "
        assert message == words + "rank 0: False, rank 1: True, rank 2: False"
        message = self.error_of({}, {0: {"allow_fp8": True}})
        assert message == words + "rank 0: True, rank 1: False, rank 2: False"

    def test_check_vendor(self) -> None:
        message = self.error_of({1: {"SHOTCAST_CHECK_VENDOR": "0"}})
        assert message == "the ranks do not agree on SHOTCAST_CHECK_VENDOR: rank 0: True, rank 1: False, rank 2: True"

    @pytest.mark.parametrize("other", [1 << 10, 32 << 20])
    def test_max_bytes(self, other: int) -> None:
        message = self.error_of({}, {2: {"max_bytes": other}})
        assert (
            message == f"the ranks do not agree on max_bytes: rank 0: {16 << 20}, rank 1: {16 << 20}, rank 2: {other}"
        )

    def test_kernels(self) -> None:
        message = self.error_of({0: {"SHOTCAST_CPU_KERNELS": "interpreter"}})
        assert message.startswith(
            "the ranks do not agree on SHOTCAST_CPU_KERNELS: rank 0: interpreter, rank 1: compiled"
        )

    def test_table(self, tmp_path: Path) -> None:
        path = tmp_path / "table.json"
        path.write_text(render("cpu", NodeShape(1, 3), {}, {}, []))
        message = self.error_of({1: {"SHOTCAST_TABLE": str(path)}})
        assert message.startswith("the ranks do not agree on tables (SHOTCAST_TABLE): rank 0: ")

    def test_table_that_one_rank_cannot_read(self, tmp_path: Path) -> None:
        message = self.error_of({1: {"SHOTCAST_TABLE": str(tmp_path / "none.json")}})
        assert message.startswith("rank 1: SHOTCAST_TABLE: cannot read ")

    def test_table_that_is_out_of_date(self, tmp_path: Path) -> None:
        reason = "has format 2; this version reads format 3: run `shotcast tune` again"
        path = tmp_path / "table.json"
        path.write_text(render("cpu", NodeShape(1, 3), {}, {}, []).replace('"format": 3', '"format": 2'))
        message = self.error_of({rank: {"SHOTCAST_TABLE": str(path)} for rank in range(3)})
        assert f"table {path} {reason}" in message

    def test_table_with_a_launch_that_the_kernels_cannot_take(self, tmp_path: Path) -> None:
        path = tmp_path / "table.json"
        row = TableRow(64, "one_shot", LaunchShape(block_words=0), "eager")
        path.write_text(render("cpu", NodeShape(1, 3), {("eager", "all_reduce", "int8"): [row]}, {}, []))
        settings = {"SHOTCAST_TABLE": str(path), "SHOTCAST_CPU_KERNELS": "interpreter"}
        message = self.error_of(dict.fromkeys(range(3), settings))
        assert "eager/all_reduce/int8, one_shot: block_words is a power of two from 16 to 8192, not 0" in message

    def test_device(self) -> None:
        messages = shotcast.spawn(targets.construction_error_of_two_devices, 2, timeout_s=300)
        assert messages == ["the ranks do not agree on device: rank 0: cuda, rank 1: cpu"] * 2

    @pytest.mark.timing
    def test_construction_without_one_rank(self) -> None:
        op, missing, took = shotcast.spawn(targets.construct_without_one_rank, 3, timeout_s=300)[0]
        assert (op, missing) == ("construction", (1,))
        assert took < 60  # of 120


class TestSharedMemory:
    def test_no_such_directory(self, tmp_path: Path) -> None:
        env = {rank: {"SHOTCAST_SHM_DIR": str(tmp_path / "none")} for rank in range(2)}
        for message in shotcast.spawn(targets.construction_error, 2, env, timeout_s=300):
            assert "rank 0: cannot create shared memory in " in message
            assert "rank 1: " in message
            assert "Set SHOTCAST_SHM_DIR to use another tmpfs" in message

    @pytest.mark.parametrize("kernels", ["compiled", "interpreter"])
    def test_too_little_shared_memory(self, kernels: str) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as folder:
            env = {"SHOTCAST_CPU_KERNELS": kernels, "SHOTCAST_SHM_DIR": folder, "TRITON_INTERPRET": "1"}
            for message in shotcast.spawn(targets.construction_error_with_little_memory, 2, 1, env=env, timeout_s=300):
                assert "rank 1: not enough shared memory: wanted" in message
                assert "rank 0" not in message
                assert "smaller max_bytes" in message
                assert "SHOTCAST_SHM_DIR" in message
            assert os.listdir(folder) == []


def test_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="positive number of processes"):
        shotcast.spawn(targets.calls_after_close, 0)
    assert issubclass(ConfigError, ValueError)
