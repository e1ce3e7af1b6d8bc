"""Operations beside those of test_cpu.py on CPU ranks: calls with a root, parts of any sizes, and strided tensors."""

from __future__ import annotations

import operation_targets as targets
import pytest

import shared_ranks
import shotcast


class TestCopies:
    @pytest.mark.parametrize(("world_size", "shift"), [(2, 1), (3, 0), pytest.param(8, 0, marks=pytest.mark.full)])
    def test_every_dtype(self, world_size: int, shift: int) -> None:
        explanations = shared_ranks.run(targets.copies, world_size, shift, timeout_s=300)[0]
        assert all(": one_shot (chunks" in text or ": two_shot (chunks" in text for text in explanations), explanations

    @pytest.mark.full
    @pytest.mark.parametrize("world_size", range(2, 9))
    @pytest.mark.parametrize("shift", [0, 1, 3])
    def test_every_world_size(self, world_size: int, shift: int) -> None:
        shared_ranks.run(targets.copies, world_size, shift, timeout_s=300)

    @pytest.mark.parametrize("world_size", [1, 3])
    def test_shapes(self, world_size: int) -> None:
        shared_ranks.run(targets.shapes, world_size, timeout_s=300)


@pytest.mark.parametrize("world_size", [2, 5])
def test_reduce_has_the_bits_of_all_reduce(world_size: int) -> None:
    assert set(shared_ranks.run(targets.reduces, world_size, timeout_s=300)) == {3 * 5 * 3}


def test_bad_arguments() -> None:
    for found in shared_ranks.run(targets.bad_arguments, 2, timeout_s=300):
        assert "root is a rank in 0..1, not 2" in found["root"]
        assert "divided among 2 ranks; its shape is [5]" in found["rows"]
        assert "x is a tensor on the root" in found["no x"]
        assert "x is a tensor on the root" in found["x of the root"]
        assert "or both None; output_sizes is None" in found["one of two"]
        assert "2 numbers from 0 up each, or both None; input_sizes is [2]" in found["too few"]
        assert "input_sizes add up to 4 rows, and the shape of x is [3]" in found["sum"]
        assert "rows to itself by input_sizes" in found["to itself"]
        assert "keep to no number of SMs" in found["sms"]
        assert "cannot work in place" in found["in place"]
        assert "the rank's own part, from byte 8 on" in found["first part"]
        assert "there is no ring gather; there is one_shot" in found["ring"]


def test_strided_tensors_are_copied_and_said_so_once_for_each_place() -> None:
    for said in shared_ranks.run(targets.strided, 2, timeout_s=300):
        assert len(said) == 2, said
        assert said[0] == (
            "operation_targets.py: x is not contiguous (strides [1, 3]), so each such call copies it first"
        )


class TestSeveralAtOnce:
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_batches_of_messages(self, world_size: int) -> None:
        assert set(shared_ranks.run(targets.batches, world_size, timeout_s=300)) == {4 * 3 * (world_size - 1)}

    def test_started_calls(self) -> None:
        shared_ranks.run(targets.started, 2, timeout_s=300)

    def test_coalesced_calls(self) -> None:
        shared_ranks.run(targets.coalesced, 3, timeout_s=300)


@pytest.mark.timing
class TestFaults:
    def test_calls_that_differ(self) -> None:
        for rank, found in enumerate(shotcast.spawn(targets.mismatches, 3, timeout_s=300)):
            texts, differing, fields = zip(*found, strict=True)
            assert fields == (("root",), ("reduction",), ("op",), ("sizes",), ("op", "nbytes")), fields
            assert differing[3] == (0,)  # of the others, only headers that have come are compared
            assert "gather(float32, 72 B, one_shot, root 1)" in texts[0]
            assert "reduce(float32, 24 B, vendor, max, root 0)" in texts[1]
            assert "all_to_all_uneven(float32, parts of any sizes, one_shot)" in texts[4]
            if rank == 1:
                assert "rank 0: sends 3 of float32 to rank 1; rank 1: expects 2 from rank 0" in texts[3]

    def test_late_rank(self) -> None:
        found = shotcast.spawn(targets.late_rank, 3, timeout_s=300)
        ops = ["gather", "scatter", "reduce", "all_to_all_uneven"]
        assert found[0] == found[1] == [((2,), op) for op in ops]

    def test_batch(self) -> None:
        found = shotcast.spawn(targets.batch_faults, 3, timeout_s=300)
        assert found[0][0] == ("recv", (1,))
        assert found[0][1] == ("send(float32, 20 B, one_shot, from rank 1)", (1,))
        assert found[2] == []

    def test_started_call_without_a_rank(self) -> None:
        found = shotcast.spawn(targets.started_without_a_rank, 3, timeout_s=300)
        assert [missing for _, missing in found[1:]] == [(0,)] * 2
        assert not any(over for over, _ in found), "a start does not wait"

    def test_killed_rank(self) -> None:
        *found, killed = shotcast.spawn(targets.killed_rank, 3, timeout_s=300, return_exceptions=True)
        assert isinstance(killed, shotcast.RankFailed)
        ops = ("gather", "scatter", "reduce", "all_to_all_uneven")
        for told in found:
            assert told[:4] == [(op, "dead", (2,), True) for op in ops]
            assert told[4][1:] == ("dead", (2,), True)
