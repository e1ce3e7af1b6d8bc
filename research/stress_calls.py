"""The calls of a stress run: drawn from a seed, made by every rank, each compared with plain PyTorch.

Call ``number`` of a run is drawn from ``seed/number`` alone, so a run can begin again shortly before a call that went
wrong. Who is late, and by how much, is drawn by each rank for itself.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import expected_results
import torch

import shotcast
from shotcast import wire
from shotcast.collectives import reference
from shotcast.collectives.norm_operands import Fp8Normed

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 65504.0, 1e-8, 3.4e38)
EPS = 1e-5
LEAST = 1 << 16
"""The fewest elements of a pool: the longest rows of all ranks fit in half of it."""
FUSED_FORMS = {"all_reduce": False, "all_reduce_fp8": True}
"""Fused calls by name, and whether their norms are FP8."""
COPIES = (
    "all_gather", "uneven_all_gather", "all_to_all", "all_to_all_uneven", "broadcast", "gather", "scatter", "send_recv",
)  # fmt: skip
"""Kinds of calls that move any dtype."""
BLOCK = 500
"""Calls between two looks at the results. On a GPU the calls of a block are enqueued without a wait."""
TURNS = 50
"""Replays of a block between two looks at the clock."""
SMALL_BYTES = 1 << 16
"""``max_bytes`` of the second communicator: messages pass through it in many pieces."""
WEIGHTS = {
    "all_reduce": 32, "vendor_reduce": 4, "reduce_scatter": 11, "all_gather": 10, "uneven_all_gather": 6,
    "all_to_all": 8, "all_to_all_uneven": 3, "broadcast": 8, "reduce": 4, "gather": 4, "scatter": 4, "send_recv": 8,
    "barrier": 1, "fused": 9, "graph": 3,
}  # fmt: skip
"""Kinds of calls, and weights by which they are drawn; graphs on GPUs only."""
ALGORITHMS = {
    "all_reduce": ("auto", "auto", "one_shot", "two_shot", "two_shot", "ring"),
    "reduce_scatter": ("auto", "one_shot", "ring"),
    "all_gather": ("auto", "one_shot", "ring"),
    "reduce": ("auto", "one_shot", "two_shot"),
}
"""Algorithms that are drawn for a kind of calls, and seldom, on GPUs, ``two_shot_fp8``; others leave the choice to
``auto``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The facts of a run on which its ranks agree.

    Attributes:
        first: the number of the first call.
        calls: the most calls.
        seconds: the run ends with the block in which it has taken so long, and replays no more.
        largest: the most elements of a message.
        progress: the files into which ranks write, after each block, what has been done; each adds its rank.
        replays: on GPUs, how often, at most, each block is replayed from a graph after it was made, on other inputs.
    """

    device: str
    seed: int
    first: int
    calls: int
    seconds: float
    largest: int
    timeout_s: float
    progress: str
    replays: int = 0


class Case(NamedTuple):
    """One call: its kind, and what is drawn for it.

    Attributes:
        start: the first element in the pools.
        form: of a fused call, a key of FUSED_FORMS; drawn if it is empty.
    """

    number: int
    kind: str
    dtype: str
    count: int
    start: int
    algorithm: str
    place: str
    rng: random.Random
    form: str = ""


def differing(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Count the elements that differ in any bit, as a 0-d tensor on the device.

    All NaNs of the dtypes that kernels add up count as equal: one of them stands for data that has not arrived.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return torch.ones((), dtype=torch.int64, device=got.device)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(got.element_size(), torch.int64)
    same = got.reshape(-1).view(kind) == wanted.reshape(-1).view(kind)
    if got.dtype in FLOATS.values():
        same |= (got.reshape(-1) != got.reshape(-1)) & (wanted.reshape(-1) != wanted.reshape(-1))
    return (~same).sum()


def joined(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of any dtype one after the other. (PyTorch cannot join all of them on a GPU.)"""
    return torch.cat([x.view(torch.uint8) for x in xs]).view(xs[0].dtype)


def beyond_rounding(normed: torch.Tensor, new_residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Count the norms that are further from float64 than float32 steps and one rounding explain."""
    value = new_residual.double()
    wanted = value / (value.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    inside = (value.shape[-1].bit_length() + 40) * torch.finfo(torch.float32).eps
    bound = (inside + torch.finfo(normed.dtype).eps / 2 * 1.01) * wanted.abs() + torch.finfo(normed.dtype).tiny
    return (~((normed.double() - wanted).abs() <= bound)).sum()


class Stress:
    """The calls of one rank."""

    def __init__(self, plan: Plan, comm: shotcast.Communicator):
        self._plan, self._comm = plan, comm
        self._small = comm.split(0, max_bytes=SMALL_BYTES)
        self._rank, self._size = comm.rank, comm.world_size
        self._cuda, topology = comm.device.type == "cuda", comm.topology
        self._compiled = not (topology.unsupported_reason or topology.runs_grids)
        self._own = random.Random(f"{plan.seed} rank {comm.rank}")
        self._wrong = torch.zeros(BLOCK, dtype=torch.int64, device=comm.device)
        self._pools = {name: self._floats(name) for name in FLOATS}
        self._bytes = [self._random_bytes(rank) for rank in range(self._size)]
        self._fp8_sums: dict[tuple[str, int], torch.Tensor] = {}
        self._streams = [torch.cuda.current_stream(comm.device)] if self._cuda else []
        self._streams += [torch.cuda.Stream(comm.device) for _ in range(2)] if self._cuda else []
        self._graphs: list[tuple[Case, torch.Tensor, torch.Tensor, torch.Tensor, Any]] = []
        self.counts: dict[str, Counter[str]] = {"kinds": Counter(), "algorithms": Counter(), "dtypes": Counter()}
        self.nbytes = 0
        self.replayed = 0
        self.began = time.monotonic()
        self._kinds = {kind: weight for kind, weight in WEIGHTS.items() if self._cuda or kind != "graph"}
        self._synchronize()

    def _floats(self, name: str) -> list[torch.Tensor]:
        """Return every rank's pool: values of many magnitudes, and in the last quarter special ones among them."""
        pools = []
        for rank in range(self._size):
            generator = torch.Generator().manual_seed(self._plan.seed * 1000 + rank)
            count = self._plan.largest
            x = torch.randn(count, generator=generator) * 10 ** torch.randint(-3, 4, (count,), generator=generator)
            special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (count,), generator=generator)]
            among = (torch.rand(count, generator=generator) < 0.1) & (torch.arange(count) >= count * 3 // 4)
            pools.append(torch.where(among, special, x).to(FLOATS[name]).to(self._comm.device))
        return pools

    def _random_bytes(self, rank: int) -> torch.Tensor:
        """Return bytes that a rank copies from; among them are words that look as if nothing had arrived."""
        generator = torch.Generator().manual_seed(self._plan.seed * 1000 + 500 + rank)
        words = torch.randint(-(1 << 31), 1 << 31, (self._plan.largest,), generator=generator).to(torch.int32)
        words[torch.rand(self._plan.largest, generator=generator) < 0.05] = -1
        return words.to(self._comm.device).view(torch.uint8)

    # --- drawing ------------------------------------------------------------------------------------------------------

    def case(self, number: int) -> Case:
        """Draw call ``number``, the same on all ranks."""
        rng = random.Random(f"{self._plan.seed}/{number}")
        kind = rng.choices(list(self._kinds), list(self._kinds.values()))[0]
        dtype = rng.choice(list(FLOATS))
        if kind in COPIES:
            dtype = rng.choice([*FLOATS, *wire.DTYPES])
        elif kind == "vendor_reduce":
            dtype = rng.choice(["int32", "int64", "uint8", "float64", "float32"])
        largest = self._plan.largest * 4 // max(4, wire.DTYPES[dtype])
        count = int((largest + 1) ** rng.random()) - 1 if rng.random() < 0.9 else rng.randrange(2048)
        start = rng.randrange(largest - count + 1)
        if rng.random() < 0.6:
            start -= start % 16  # 16 bytes, whatever the dtype
        algorithm = rng.choice(ALGORITHMS.get(kind, ("auto",)))
        if kind == "all_reduce" and self._cuda and rng.random() < 0.01:
            algorithm = "two_shot_fp8"
        return Case(number, kind, dtype, count, start, algorithm, rng.choice(["new", "given", "in place"]), rng)

    def window(self, case: Case, rank: int) -> torch.Tensor:
        """Return a rank's input: a part of its pool, which no call changes."""
        end = case.start + case.count
        if case.kind in ("all_reduce", "reduce_scatter", "reduce", "fused", "graph"):
            return self._pools[case.dtype][rank][case.start : end]
        if case.kind == "vendor_reduce":  # small whole numbers, whose sum is exact in any order
            return (self._bytes[rank][case.start : end] & 3).to(getattr(torch, case.dtype))
        width = wire.DTYPES[case.dtype]
        content = self._bytes[rank][case.start * width : end * width]
        return (content & 1).view(torch.bool) if case.dtype == "bool" else content.view(getattr(torch, case.dtype))

    def _windows(self, case: Case) -> list[torch.Tensor]:
        return [self.window(case, rank) for rank in range(self._size)]

    # --- making -------------------------------------------------------------------------------------------------------

    def run(self, case: Case) -> None:
        """Make one call, and count what is wrong with its results on the device."""
        stream = case.rng.choice(self._streams) if self._cuda and case.kind != "graph" else None
        with torch.cuda.stream(stream):
            self._straggle()
            wrong = getattr(self, f"_{case.kind}")(case)
            self._wrong[case.number % BLOCK] += wrong
        self.counts["kinds"][case.kind] += 1
        self.counts["algorithms"]["vendor" if case.kind == "vendor_reduce" else case.algorithm] += 1
        self.counts["dtypes"][case.dtype] += 1
        self.nbytes += case.count * wire.DTYPES[case.dtype]

    def _straggle(self) -> None:
        late = self._own.random()
        if late < 0.1 and self._cuda:
            torch.cuda._sleep(self._own.randrange(300_000))
        if late < (0.002 if self._cuda else 0.05):
            time.sleep(self._own.random() * 0.003)
        elif late > 0.9998:
            time.sleep(0.1)

    def _communicator(self, case: Case) -> shotcast.Communicator:
        """Return one of two communicators. The second serves large messages where they pass in chunks: on the CPU."""
        small = case.count * wire.DTYPES[case.dtype] <= SMALL_BYTES // self._size
        return self._small if case.rng.random() < 0.2 and (small or self._compiled) else self._comm

    def _placed(self, case: Case, x: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the input and the ``out`` of a call."""
        if case.place == "in place" and list(shape) == list(x.shape):
            x = x.clone()
            return x, x
        if case.place == "new":
            return x, None
        count, shift = math.prod(shape), case.rng.randrange(4)
        return x, x.new_empty(count + shift)[shift:].view(shape)

    def _all_reduce(self, case: Case) -> torch.Tensor:
        if case.algorithm == "two_shot_fp8":  # of few cases, as its reference is slow, and without special values
            case = case._replace(start=0, count=(self._plan.largest // 2) >> case.number % 12)
        xs = self._windows(case)
        x, out = self._placed(case, xs[self._rank], xs[0].shape)
        got = self._communicator(case).all_reduce(x, out=out, algorithm=case.algorithm)
        if case.algorithm == "two_shot_fp8":
            key = case.dtype, case.count
            if key not in self._fp8_sums:
                self._fp8_sums[key] = expected_results.all_reduce(xs, case.algorithm)
                self._synchronize()  # calls on other streams compare with it too
            return differing(got, self._fp8_sums[key])
        # "auto" may take what the contract of numerics allows alone: the ring where it has the same bits
        return differing(
            got, expected_results.all_reduce(xs, "one_shot" if case.algorithm == "auto" else case.algorithm)
        )

    def _vendor_reduce(self, case: Case) -> torch.Tensor:
        xs = self._windows(case)
        reduction = case.rng.choice(["sum", "max", "min", "prod"])
        x, out = self._placed(case, xs[self._rank], xs[0].shape)
        got = self._comm.all_reduce(x, out=out, algorithm="vendor", reduction=reduction)
        wanted = xs[0]
        combine: dict[str, Callable[..., torch.Tensor]] = {
            "sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul
        }  # fmt: skip
        for other in xs[1:]:
            wanted = combine[reduction](wanted, other)
        return differing(got, wanted)

    def _reduce_scatter(self, case: Case) -> torch.Tensor:
        xs = self._windows(case._replace(count=case.count // self._size * self._size))
        x, out = self._placed(case._replace(place="given"), xs[self._rank], (xs[0].numel() // self._size,))
        got = self._communicator(case).reduce_scatter(x, out=out, algorithm=case.algorithm)
        name = "one_shot" if case.algorithm == "auto" else case.algorithm
        return differing(got, expected_results.reduce_scatter(xs, self._rank, name))

    def _all_gather(self, case: Case) -> torch.Tensor:
        xs = self._windows(case._replace(count=case.count // self._size))
        x, out = self._placed(case, xs[self._rank], (xs[0].numel() * self._size,))
        moved = case.dtype in FLOATS or self._compiled  # by the ring
        algorithm = "auto" if case.algorithm == "ring" and not moved else case.algorithm
        got = self._communicator(case).all_gather(x, out=None if out is x else out, algorithm=algorithm)
        return differing(got, joined(xs))

    def _uneven_all_gather(self, case: Case) -> torch.Tensor:
        sizes = [case.rng.randrange(case.count // self._size + 1) for _ in range(self._size)]
        xs = [x[:size] for x, size in zip(self._windows(case), sizes, strict=True)]
        return differing(self._communicator(case).all_gather(xs[self._rank], sizes=sizes), joined(xs))

    def _all_to_all(self, case: Case) -> torch.Tensor:
        xs = self._windows(case._replace(count=case.count // self._size * self._size))
        got = self._communicator(case).all_to_all(xs[self._rank])
        return differing(got, joined([x.view(self._size, -1)[self._rank] for x in xs]))

    def _all_to_all_uneven(self, case: Case) -> torch.Tensor:
        sizes = [
            [case.rng.randrange(case.count // self._size + 1) for _ in range(self._size)] for _ in range(self._size)
        ]
        xs = [x[: sum(sent)].split(sent) for x, sent in zip(self._windows(case), sizes, strict=True)]
        received = [sent[self._rank] for sent in sizes]
        x = joined(xs[self._rank])
        got = self._comm.all_to_all(x, input_sizes=sizes[self._rank], output_sizes=received)
        return differing(got, joined([parts[self._rank] for parts in xs]))

    def _reduce(self, case: Case) -> torch.Tensor:
        xs, root = self._windows(case), case.rng.randrange(self._size)
        x, out = self._placed(case, xs[self._rank], xs[0].shape)
        got = self._communicator(case).reduce(x, root, out=out, algorithm=case.algorithm)
        return differing(got, reference.ordered_sum(xs)) if self._rank == root else differing(x[:0], x[:0])

    def _gather(self, case: Case) -> torch.Tensor:
        xs, root = self._windows(case._replace(count=case.count // self._size)), case.rng.randrange(self._size)
        got = self._communicator(case).gather(xs[self._rank], root)
        wanted = joined(xs)
        return differing(got, wanted) if self._rank == root else differing(wanted[:0], wanted[:0])

    def _scatter(self, case: Case) -> torch.Tensor:
        xs = self._windows(case._replace(count=case.count // self._size * self._size))
        root = case.rng.randrange(self._size)
        got = self._communicator(case).scatter(xs[self._rank], root)
        return differing(got, xs[root].view(self._size, -1)[self._rank])

    def _broadcast(self, case: Case) -> torch.Tensor:
        root = case.rng.randrange(self._size)
        got = self._communicator(case).broadcast(self.window(case, self._rank).clone(), root)
        return differing(got, self.window(case, root))

    def _send_recv(self, case: Case) -> torch.Tensor:
        """Exchange messages in random pairs; with three ranks or more, some take no part."""
        order = case.rng.sample(range(self._size), self._size)
        comm, at = self._communicator(case), order.index(self._rank)
        other = order[at ^ 1] if at ^ 1 < self._size else None
        if other is None:
            return self._wrong.new_zeros(())
        x = self.window(case, self._rank)
        received = torch.empty_like(x)
        if at % 2 == 0 or comm.waiting_messages(x):
            comm.send(x, other)
            comm.recv(received, other)
        else:
            comm.recv(received, other)
            comm.send(x, other)
        return differing(received, self.window(case, other))

    def _barrier(self, case: Case) -> torch.Tensor:
        self._communicator(case).barrier()
        return self._wrong.new_zeros(())

    def _fused(self, case: Case) -> torch.Tensor:
        """Make a fused call: the sum and the new residual have exact bits, the norm is compared with float64."""
        hidden = 4096 if self._cuda else case.rng.choice([64, 520, 2048])
        dtype = "bfloat16" if self._cuda else case.dtype  # each dtype is another kernel to compile
        tame = self._plan.largest // 2
        rows = max(1, min(16, case.count // (hidden * self._size), tame // hidden))
        count = rows * hidden
        case = case._replace(dtype=dtype, count=count, start=case.rng.randrange(tame - count + 1) // 16 * 16)
        xs = [x.view(-1, hidden) for x in self._windows(case)]
        before = xs[0].flip(0)
        weight = self._pools[dtype][0][:hidden].clamp(-2, 2)
        new_residual = reference.add_residual(reference.ordered_sum(xs), before)
        operands = (xs[self._rank], before, weight, EPS)
        quantized = FUSED_FORMS[case.form] if case.form else case.rng.random() < 0.5
        comm, options = self._comm, {"with_normed": True} if quantized else {}
        got: Any = (comm.all_reduce_rms_norm_fp8 if quantized else comm.all_reduce_rms_norm)(*operands, **options)
        normed, residual = (got.normed, got.new_residual) if isinstance(got, Fp8Normed) else got
        wrong = differing(residual, new_residual)
        wrong = wrong + beyond_rounding(normed, new_residual, weight)
        if isinstance(got, Fp8Normed):
            wanted, scale = reference.quantize(normed)
            wrong = wrong + differing(got.quantized.float(), wanted.float()) + differing(got.scale, scale)
        return wrong

    # --- graphs -------------------------------------------------------------------------------------------------------

    def _capture(self) -> None:
        """Capture graphs of two calls each: a sum by one algorithm, and a gather."""
        for number, algorithm in enumerate(("one_shot", "two_shot", "ring", "auto")):
            dtype = list(FLOATS)[number % len(FLOATS)]
            count = 1000 * 8**number % self._plan.largest
            case = Case(0, "graph", dtype, count, 0, algorithm, "given", random.Random(number))
            x = torch.zeros(case.count, dtype=FLOATS[dtype], device=self._comm.device)
            out, gathered = torch.empty_like(x), torch.empty(case.count * self._size, dtype=x.dtype, device=x.device)

            def calls(
                x: torch.Tensor = x, out: torch.Tensor = out, gathered: torch.Tensor = gathered, by: str = algorithm
            ) -> None:
                self._comm.all_reduce(x, out=out, algorithm=by)
                self._comm.all_gather(x, out=gathered)

            calls()
            self._synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls()
            self._graphs.append((case, x, out, gathered, graph))

    def _graph(self, case: Case) -> torch.Tensor:
        """Replay a graph on other inputs, ordered with the calls on all streams."""
        if not self._graphs:
            self._capture()
        captured, x, out, gathered, graph = case.rng.choice(self._graphs)
        current = self._streams[0]
        for stream in self._streams[1:]:
            current.wait_stream(stream)
        start = case.rng.randrange(self._plan.largest - captured.count + 1)
        xs = self._windows(captured._replace(start=start))
        x.copy_(xs[self._rank])
        graph.replay()
        name = "one_shot" if captured.algorithm == "auto" else captured.algorithm
        wrong = differing(out, expected_results.all_reduce(xs, name)) + differing(gathered, joined(xs))
        for stream in self._streams[1:]:
            stream.wait_stream(current)
        return wrong

    # --- blocks -------------------------------------------------------------------------------------------------------

    def block(self, first: int, calls: int) -> list[int]:
        """Make calls, wait for their results, and return the numbers of those that were wrong."""
        for number in range(first, first + calls):
            self.run(self.case(number))
        slots = self.wrong()
        return [number for number in range(first, first + calls) if number % BLOCK in slots]

    def replay(self, first: int, calls: int) -> list[int]:
        """Replay calls from one graph on other inputs. Return the numbers of those that were wrong in any replay."""
        cases = [self.case(number) for number in range(first, first + calls)]
        cases = [case for case in cases if case.kind != "graph" and case.algorithm != "two_shot_fp8"]
        streams, graph = self._streams, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            capturing = torch.cuda.current_stream(self._comm.device)
            self._streams = [capturing, *streams[1:]]
            self.turn()
            for stream in streams[1:]:
                stream.wait_stream(capturing)
            for case in cases:
                self.run(case)
            for stream in streams[1:]:
                capturing.wait_stream(stream)
        self._streams = streams
        made = 0
        while made < self._plan.replays and not self.late():
            turns = min(TURNS, self._plan.replays - made)
            for _ in range(turns):
                graph.replay()
            made += turns
        slots = self.wrong()
        graph.reset()
        self.replayed += len(cases) * made
        return [number for number in range(first, first + calls) if number % BLOCK in slots]

    def late(self) -> bool:
        """Return, on all ranks alike, whether the run has taken its time on any of them."""
        mine = torch.tensor([time.monotonic() - self.began > self._plan.seconds], device=self._comm.device)
        return bool(self._comm.all_gather(mine.to(torch.uint8)).any())

    def turn(self) -> None:
        """Turn the pools, so that calls have other inputs. Special values stay in the last quarter."""
        self._fp8_sums.clear()
        pools = [pool for pools in self._pools.values() for pool in pools]
        for pool in (*pools, *(content.view(torch.int32) for content in self._bytes)):
            quarter = pool.numel() // 4
            for part in pool.split((2 * quarter, quarter, pool.numel() - 3 * quarter)):
                part.copy_(part.roll(1021))

    def wrong(self) -> list[int]:
        """Wait for the calls since the last look. Return the numbers, modulo BLOCK, of those with wrong results."""
        self._synchronize()
        self._comm.check()
        self._small.check()
        slots = self._wrong.nonzero().view(-1).tolist()
        self._wrong.zero_()
        self._synchronize()
        return slots

    def _synchronize(self) -> None:
        """Wait for the work on all streams."""
        if self._cuda:
            torch.cuda.synchronize(self._comm.device)

    def close(self) -> None:
        """Close the second communicator; the first is the caller's."""
        self._small.close()


def run(plan: Plan, calls_of_rank: type[Stress] = Stress) -> None:
    """Make the calls of a run. Every rank runs this; rank 0, and a rank with wrong results, write what was done.

    The run goes on after a wrong result, and ends after the block with the tenth.
    """
    with shotcast.Communicator(device=plan.device, timeout_s=plan.timeout_s) as comm:
        stress = calls_of_rank(plan, comm)
        done, everywhere, wrong = 0, 0, []
        while True:
            calls = min(BLOCK, plan.calls - done)
            mine = stress.block(plan.first + done, calls)
            if plan.replays:
                mine += stress.replay(plan.first + done, calls)
            done += calls
            everywhere += int(comm.all_gather(torch.tensor([len(mine)], device=comm.device)).sum())
            wrong += [{"call": number, "rank": comm.rank, "case": str(stress.case(number)[:7])} for number in mine]
            if comm.rank == 0 or mine:
                state = {
                    "calls": done,
                    "seconds": round(time.monotonic() - stress.began, 1),
                    "replayed": stress.replayed,
                    "message_bytes": stress.nbytes,
                    **{name: dict(sorted(counter.items())) for name, counter in stress.counts.items()},
                    "wrong": wrong,
                }
                Path(f"{plan.progress}.{comm.rank}").write_text(json.dumps(state))
            if stress.late() or done >= plan.calls or everywhere >= 10:
                break
        stress.close()
