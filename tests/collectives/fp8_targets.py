"""Functions that the ranks of tests/collectives/test_fp8_transport.py run."""

from __future__ import annotations

import os
import random
from typing import Any

import expected_results
import pytest
import torch
from workers import FLOATS, check, inputs, launched, launches, shifted, straggle, tame

import shotcast
from executor_calls import clear_after_read_from
from shotcast.collectives import reference

FP8 = "two_shot_fp8"
Outcome = dict[str, Any]


def matrix(counts: list[int], dtypes: list[str], clears: bool) -> int:
    """Make calls of all sizes, aligned and not, in place and not, with other calls between them.

    Return their number.
    """
    done = 0
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        if clears:
            clear_after_read_from(comm, 64)
        rng = random.Random(comm.rank)
        for name in dtypes:
            for count in counts:
                for shift in (0, 1):
                    xs = inputs(count, FLOATS[name], comm.world_size, count, comm.device)
                    xs = xs if shift else tame(xs)
                    wanted = expected_results.all_reduce(xs, FP8)
                    straggle(comm, rng)
                    x = shifted(xs[comm.rank], shift)
                    check(comm.all_reduce(x, algorithm=FP8), wanted, (name, count, shift))
                    if done % 4 == 0:  # so that both kinds of call use each generation, after longer and shorter ones
                        check(comm.all_reduce(x, algorithm="two_shot"), reference.ordered_sum(xs), "between")
                    comm.all_reduce(x, out=x, algorithm=FP8)
                    check(x, wanted, (name, count, shift, "in place"))
                    done += 2
        comm.check()
    return done


def shorter_and_longer(calls: int) -> int:
    """Make calls of random sizes, with other algorithms between them. Return the total number of elements."""
    total = 0
    with shotcast.Communicator(device="cpu", max_bytes=1 << 14, timeout_s=60) as comm:
        shared, own = random.Random(5), random.Random(comm.rank)
        pool = tame(inputs(2000, torch.bfloat16, comm.world_size, 1, comm.device))
        for _ in range(calls):
            count = int(2000 ** shared.random())
            name = shared.choice([FP8, FP8, "one_shot", "two_shot"])
            xs = [x[:count] for x in pool]
            straggle(comm, own)
            check(
                comm.all_reduce(xs[comm.rank].clone(), algorithm=name),
                expected_results.all_reduce(xs, name),
                (name, count),
            )
            total += count
        comm.check()
    return total


def longest_messages(dtype: str) -> list[int]:
    """Send the longest legal message, between calls that would notice writes past the slots. Return its bytes."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 12, timeout_s=60) as comm:
        kind = FLOATS[dtype]
        count = max(n for n in range(1, 1 << 13) if FP8 in comm.candidates(torch.empty(n, dtype=kind)))
        for seed in range(4):
            xs = tame(inputs(count, kind, comm.world_size, seed, comm.device))
            check(comm.all_reduce(xs[comm.rank], algorithm=FP8), expected_results.all_reduce(xs, FP8), (dtype, count))
            few = [x[:40] for x in xs]
            check(comm.all_reduce(few[comm.rank], algorithm="two_shot"), reference.ordered_sum(few), "short")
        comm.check()
        with pytest.raises(shotcast.ConfigError, match="of a workspace"):
            comm.all_reduce(torch.ones(count + 8192, dtype=kind), algorithm=FP8)
        return [count * kind.itemsize]


def nothing_but_sentinels() -> int:
    """Reduce NaNs and infinities, whose bytes may all be 0xFF, as in sentinel words.

    Return how many outputs were NaN.
    """
    with shotcast.Communicator(device="cpu", max_bytes=1 << 14, timeout_s=100) as comm:
        found = 0
        for dtype in FLOATS.values():
            bits = torch.full((1100 * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
            for x in (bits, torch.full((1100,), torch.inf, dtype=dtype), torch.full((1100,), -torch.inf, dtype=dtype)):
                found += int(comm.all_reduce(x, algorithm=FP8).isnan().all())
        comm.check()
    return found


def words_left_in_slots(dtype: str, count: int) -> list[int]:
    """Count the words other than the sentinel in all slots of this rank.

    The first count is taken after a call, the second after a short call that follows it.
    """
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        where, left = comm._executor.workspaces[0].where, []
        words = comm._executor.workspaces[0].memory.view(comm.rank, 0, (where.nbytes // 4,), torch.int32)
        for size, name in ((count, FP8), (4, "one_shot")):
            comm.all_reduce(torch.ones(size, dtype=FLOATS[dtype]), algorithm=name)
            comm._host.barrier()
            left.append(int((words[where.slots_at * 4 : where.staging_at * 4] != -1).sum()))
            comm._host.barrier()
        comm.check()
    return left


def bits_of_launches() -> bool:
    """Check that the bits do not depend on the launch shape."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        for dtype in (torch.float32, torch.bfloat16):
            xs = tame(inputs(3001, dtype, comm.world_size, 11, comm.device))
            wanted = expected_results.all_reduce(xs, FP8)
            for launch in launches(comm):
                check(launched(comm, xs[comm.rank], FP8, launch), wanted, (dtype, launch))
        comm.check()
    return True


def choices(allow_fp8: bool | None, variable: str) -> Outcome:
    """Return what a communicator with this argument and environment chooses and does, and what its child chooses."""
    os.environ["SHOTCAST_ALLOW_FP8"] = variable
    with shotcast.Communicator(device="cpu", allow_fp8=allow_fp8, timeout_s=100) as comm:
        x = torch.zeros(1 << 20)
        explanation = comm.explain(x)
        child = comm.split(0)
        assert child is not None
        with child:
            inherited = child.explain(x).algorithm
        few = inputs(500, torch.float32, comm.world_size, 3, comm.device)
        named = comm.all_reduce(few[comm.rank], algorithm=FP8)
        check(named, expected_results.all_reduce(few, FP8), "named")
        return {
            "algorithm": explanation.algorithm,
            "reason": explanation.reason,
            "child": inherited,
            "legal": explanation.candidates,
        }
