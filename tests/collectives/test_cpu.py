"""The Communicator on compiled CPU ranks: values, bits, shapes, threads and states."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import communicator_targets as targets
import pytest
from workers import FLOATS, across_epochs, changing_sizes, matrix, numerics, waiting_messages

import shotcast
from shotcast import wire
from shotcast.collectives.choice.table import TableRow, render
from shotcast.wire import LaunchShape, NodeShape

ODD_COUNTS = [0, 1, 5, 63, 4099]
MANY_COUNTS = [0, 1, 2, 3, 5, 7, 8, 63, 64, 65, 1000, 4095, 4096, 4099, 65_537, 300_001, 1 << 20]


class TestValues:
    @pytest.mark.every(4)
    @pytest.mark.parametrize(
        ("world_size", "counts", "shift"),
        [(2, [*ODD_COUNTS, 300_001], 1), (3, ODD_COUNTS, 0), (5, [0, 2, 4099], 1), (8, [1, 63, 20_011], 1)],
    )
    def test_matrix(self, world_size: int, counts: list[int], shift: int) -> None:
        done = shotcast.spawn(matrix, world_size, "cpu", list(FLOATS), counts, shift, timeout_s=300)
        assert min(done) == max(done) == len(counts) * 3 * 18

    @pytest.mark.full
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("max_bytes", [1 << 14, None])
    @pytest.mark.parametrize("shift", [0, 1, 3])
    @pytest.mark.parametrize("world_size", range(2, 9))
    def test_whole_matrix(self, world_size: int, shift: int, max_bytes: int | None) -> None:
        shotcast.spawn(matrix, world_size, "cpu", list(FLOATS), MANY_COUNTS, shift, max_bytes, timeout_s=800)

    @pytest.mark.parametrize(("world_size", "shift"), [(2, 1), (3, 0), pytest.param(6, 1, marks=pytest.mark.full)])
    def test_copies_of_every_dtype(self, world_size: int, shift: int) -> None:
        done = shotcast.spawn(targets.copies_of_every_dtype, world_size, [0, 1, 13], shift, timeout_s=300)
        assert set(done) == {3 * len(wire.DTYPES)}

    @pytest.mark.parametrize(("world_size", "part"), [(2, 0), (3, 1)])
    def test_every_reduction(self, world_size: int, part: int) -> None:
        shotcast.spawn(targets.every_reduction, world_size, part, 2, timeout_s=300)

    @pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full), 7])
    def test_changing_sizes_with_stragglers(self, world_size: int) -> None:
        shotcast.spawn(changing_sizes, world_size, "cpu", 600 // world_size, 60_000, world_size, timeout_s=300)

    @pytest.mark.full
    def test_more_ranks_than_own_kernels_serve(self) -> None:
        explanation = shotcast.spawn(targets.more_ranks_than_kernels_serve, wire.MAX_WORLD_SIZE + 1, timeout_s=300)[0]
        assert "vendor, by legality: native kernels serve up to 8 ranks, not 9" in explanation

    def test_one_rank(self) -> None:
        shotcast.spawn(targets.single_rank, 1, timeout_s=300)

    def test_shapes(self) -> None:
        shotcast.spawn(targets.shapes, 3, timeout_s=300)

    def test_rms_norm(self) -> None:
        shotcast.spawn(targets.rms_norms, 3, timeout_s=300)

    @pytest.mark.parametrize("world_size", [2, pytest.param(5, marks=pytest.mark.full)])
    def test_messages(self, world_size: int) -> None:
        shotcast.spawn(targets.messages, world_size, timeout_s=300)

    def test_messages_wait_in_the_mailbox(self) -> None:
        assert shotcast.spawn(waiting_messages, 3, "cpu", 30, timeout_s=300) == [6 * (4 + 4 + 4 + 2 + 1)] * 2 + [0]

    def test_number_of_messages_that_may_wait(self) -> None:
        assert shotcast.spawn(targets.mailbox_capacity, 2, timeout_s=300) == [[4, 0, 0]] * 2

    @pytest.mark.timing
    def test_first_messages_wait_for_nobody_else(self) -> None:
        assert max(shotcast.spawn(targets.first_messages, 3, timeout_s=200)) < 60, "of 300 to wait for the third rank"

    @pytest.mark.full
    def test_more_calls_than_a_communicator_remembers(self) -> None:
        from shotcast.collectives.prepared import KEPT_CALLS

        kept = shotcast.spawn(targets.many_different_calls, 2, KEPT_CALLS + 100, timeout_s=300)
        assert all(KEPT_CALLS // 2 < remembered <= KEPT_CALLS and hot for remembered, hot in kept)


class TestBits:
    @pytest.mark.every(3)
    @pytest.mark.parametrize("world_size", [2, 3, 8])
    def test_same_on_all_ranks_and_for_both_shots(self, world_size: int) -> None:
        results = shotcast.spawn(numerics, world_size, "cpu", timeout_s=300)
        assert len(results[0]) == 3
        assert all(result == results[0] for result in results)

    @pytest.mark.parametrize("world_size", [2, 5])
    def test_epochs_across_borders(self, world_size: int) -> None:
        for ends in shotcast.spawn(across_epochs, world_size, "cpu", timeout_s=300):
            assert ends == [(1 << 16) + 8, (1 << 31) + 8, (1 << 32) + 8]

    @pytest.mark.full
    def test_workspace_does_not_change_the_answer(self) -> None:
        results = shotcast.spawn(targets.sums_with_small_workspaces, 3, timeout_s=300)
        assert all(result == results[0] for result in results)
        found = results[0]
        third = len(found) // 3
        assert found[:third] == found[third : 2 * third] == found[2 * third :]
        assert found[:3] == found[3:6], "one-shot and two-shot"

    @pytest.mark.full
    def test_chunks_of_a_table_do_not_change_the_answer(self, tmp_path: Path) -> None:
        bits = set()
        for algorithm in ("one_shot", "two_shot"):
            for chunk_bytes in (64, 4096):
                path = tmp_path / f"{algorithm}{chunk_bytes}.json"
                row = TableRow(float("inf"), algorithm, LaunchShape(0, 0, 0, chunk_bytes), "eager")
                path.write_text(render("cpu", NodeShape(1, 3), {("eager", "all_reduce", "bfloat16"): [row]}, {}, []))
                env = {"SHOTCAST_TABLE": str(path)}
                for found, explanation in shotcast.spawn(
                    targets.sums_with_chunks, 3, [algorithm], env=env, timeout_s=300
                ):
                    assert f"{algorithm} (chunks of {chunk_bytes} bytes), by user table: {path}" in explanation
                    bits.add(found)
        assert len(bits) == 1


@pytest.mark.timing
class TestThreads:
    def test_two_concurrent_calls_are_refused(self) -> None:
        errors = shotcast.spawn(targets.two_threads, 2, timeout_s=300)[0]
        assert len(errors) == 4
        assert all("two threads use one communicator at once" in text for text in errors)

    def test_close_waits_for_a_call_of_another_thread(self) -> None:
        error, took = shotcast.spawn(targets.closed_during_a_call, 2, timeout_s=300)[0]
        assert error == "CollectiveTimeout"
        assert 0.9 < took < 60, "the close waits for the deadline of the call"


@pytest.mark.timing
class TestStates:
    def test_context_timeout_and_close(self) -> None:
        shotcast.spawn(targets.states, 3, timeout_s=300)

    @pytest.mark.full
    def test_reset_without_a_failure(self) -> None:
        epochs = shotcast.spawn(targets.repeated_resets, 2, timeout_s=300)
        assert epochs[0] == epochs[1]
        assert epochs[0] == sorted(set(epochs[0]))


@pytest.mark.full
def test_rendezvous_at_a_file(tmp_path: Path) -> None:
    shotcast.spawn(targets.rendezvous_at_a_file, 2, str(tmp_path / "store"), timeout_s=300)


@pytest.mark.full
def test_started_by_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, torch, shotcast
            with shotcast.Communicator(device="cpu", timeout_s=30) as comm:
                assert (comm.rank, comm.world_size) == (int(os.environ["RANK"]), 2)
                assert comm.topology.transport.name == "compiled"
                for algorithm in ("one_shot", "two_shot", "ring", "vendor"):
                    got = comm.all_reduce(torch.full([1001], comm.rank + 1.0), algorithm=algorithm)
                    assert got.tolist() == [3.0] * 1001, algorithm
                half = comm.split(comm.rank)
                assert half.world_size == 1
                print(f"rank {comm.rank} is done", flush=True)
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    source = str(Path(shotcast.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "rank 0 is done" in done.stdout
    assert "rank 1 is done" in done.stdout
