"""Functions that the ranks of the tests of fused operations run, on compiled CPU ranks, the interpreter, and GPUs."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from workers import FLOATS, check, differing, inputs, settle, shifted, straggle

import shotcast
from shotcast import wire
from shotcast.collectives import reference, separate_norm
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.norm_operands import Fp8Normed, norm_operands
from shotcast.wire import Op

EPS = 1e-5
QUANTIZATIONS = ("", "static", "dynamic")


class Case(NamedTuple):
    """Rows of one length. ``weight`` is the dtype of the weight where it is another than that of the rows."""

    dtype: str
    rows: int
    hidden: int
    shift: int = 0
    weight: str = ""


class Data(NamedTuple):
    """Every rank's tensors, the same on all ranks."""

    xs: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor


class Results(NamedTuple):
    """The results of a call. A result that was not requested is None."""

    new_residual: torch.Tensor
    normed: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    scale: torch.Tensor | None = None


def data(case: Case, world_size: int, seed: int, device: torch.device) -> Data:
    """Return inputs of every magnitude whose squares the dtype can hold.

    They include rows of zeros, rows with NaN and rows with infinity.
    """
    dtype = FLOATS[case.dtype]
    generator = torch.Generator().manual_seed(seed)

    def random_tensor(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator) * 10 ** torch.randint(-3, 3, shape, generator=generator)
        if shape[0] > 3:
            x[1] = 0.0
            x[2, shape[1] // 2] = float("nan")
            x[3, 0] = float("inf")
        return x.to(dtype).to(device)

    xs = [random_tensor(case.rows, case.hidden) for _ in range(world_size)]
    residual = random_tensor(case.rows, case.hidden)
    weight = torch.linspace(-2, 2, case.hidden).to(FLOATS[case.weight or case.dtype]).to(device)
    return Data(xs, residual, weight, weight.flip(0) / 2, torch.tensor([0.031], device=device))


def close_to_exact(normed: torch.Tensor, new_residual: torch.Tensor, operands: Data, layer: bool, what: Any) -> None:
    """Check the norm against float64, within the errors of float32 steps and one rounding; NaN must agree."""
    value, weight = new_residual.double(), operands.weight.double()
    largest = value.abs().amax(-1, keepdim=True)
    if layer:
        value = value - value.mean(-1, keepdim=True)
    deviation = (value.square().mean(-1, keepdim=True) + EPS).sqrt()
    wanted = value / deviation * weight
    # float32 steps: a mean of `hidden` squares, a square root, two products
    steps = (value.shape[-1].bit_length() + 40) * torch.finfo(torch.float32).eps
    inside = steps * wanted.abs()
    if layer:  # the mean has an error of its own, and there is a last sum
        inside = inside + steps * (weight.abs() * largest / deviation + operands.bias.double().abs())
        wanted = wanted + operands.bias.double()
    bound = inside + torch.finfo(normed.dtype).eps / 2 * 1.01 * wanted.abs() + torch.finfo(normed.dtype).tiny
    good = ((normed.double() - wanted).abs() <= bound) | (normed.isnan() & wanted.isnan())
    assert bool(good.all()), (what, normed[~good][:4], wanted[~good][:4])


def call(
    comm: Communicator,
    op: Op,
    x: torch.Tensor,
    residual: torch.Tensor,
    operands: Data,
    quantize: str,
    keeps: bool,
    algorithm: str,
    out: Any = None,
) -> Results:
    """Make one fused call by its public method."""
    shift = (operands.bias,) if op is Op.ALL_REDUCE_LAYER_NORM else ()
    make = getattr(comm, op.label + ("_fp8" if quantize else ""))
    if not quantize:
        normed, new_residual = make(x, residual, operands.weight, *shift, EPS, algorithm, out)
        return Results(new_residual, normed)
    scale = operands.scale if quantize == "static" else None
    got = make(x, residual, operands.weight, *shift, EPS, scale, keeps, algorithm, out)
    assert (got.normed is not None) == keeps
    assert got.scale is scale or scale is None
    return Results(got.new_residual, got.normed, got.quantized, got.scale)


def unfused(comm: Communicator, op: Op, x: torch.Tensor, residual: torch.Tensor, operands: Data) -> Results:
    """Compute the sum by a plain call, and then the norm."""
    total = comm.all_reduce(x, algorithm="one_shot" if comm.topology.shape.nodes == 1 else "nvrar")
    # Clone the operands: the separate norm takes tensors that begin at multiples of 16 bytes.
    kind = (wire.LAYER, operands.bias.clone()) if op is Op.ALL_REDUCE_LAYER_NORM else ()
    norm, tensors = norm_operands(
        "test", comm.device, total, residual.clone(), operands.weight.clone(), EPS, None, *kind
    )
    separate_norm.norm_sum(total, tensors, norm, comm.topology.transport.name != "compiled")
    return Results(tensors.new_residual, tensors.normed)


FORMS = (("", True), ("static", True), ("dynamic", False), ("static", False), ("dynamic", True))
"""The quantization (none, one scale for the tensor, or one a row), and whether the norm is also returned."""


def check_case(comm: Communicator, case: Case, op: Op, seed: int, rng: random.Random, forms: int) -> int:
    """Check ``forms`` forms of one operation by every algorithm. Return the number of calls."""
    operands = data(case, comm.world_size, seed, comm.device)
    weight, bias = shifted(operands.weight, case.shift), shifted(operands.bias, case.shift)
    operands = operands._replace(weight=weight, bias=bias)
    x = shifted(operands.xs[comm.rank], case.shift)
    residual = shifted(operands.residual, case.shift)
    wanted = reference.add_residual(reference.tree_sum(operands.xs, comm.topology.layout), residual)
    plain = unfused(comm, op, x, residual, operands)
    check(plain.new_residual, wanted, (case, op, "unfused"))
    assert plain.normed is not None
    close_to_exact(plain.normed, wanted, operands, op is Op.ALL_REDUCE_LAYER_NORM, (case, op, "unfused"))
    done = 1
    known, shape = comm.topology.algorithms, comm.topology.shape
    algorithms = [
        name for name in comm.candidates(x, op.label) if name != "vendor" and known[name].keeps_bits(op, shape)
    ] or ["auto"]
    chosen = [FORMS[(seed + i) % len(FORMS)] for i in range(forms)]
    for algorithm, (quantize, keeps) in itertools.product(algorithms, chosen):
        what = (case, op.label, algorithm, quantize, keeps)
        straggle(comm, rng)
        got = call(comm, op, x, residual, operands, quantize, keeps, algorithm)
        check(got.new_residual, wanted, what)
        if got.normed is not None:
            check(got.normed, plain.normed, what)
        if quantize:
            given = operands.scale if quantize == "static" else None
            if plain.normed.numel():
                quantized, scale = reference.quantize(plain.normed, given)
                assert got.quantized is not None
                check(got.quantized.float(), quantized.float(), what)
                check(got.scale, scale, what)
        done += 1
    return done


def cases(device: str, listed: list[Case], ops: list[Op], max_bytes: int, forms: int = len(FORMS)) -> int:
    """Check each case of each operation, with random stragglers. Return the number of calls."""
    done = 0
    with shotcast.Communicator(device=device, max_bytes=max_bytes, timeout_s=60) as comm:
        rng = random.Random(comm.rank)
        for number, (case, op) in enumerate(itertools.product(listed, ops)):
            done += check_case(comm, case, op, number, rng, forms)
        settle(comm)
    return done


def into_given_tensors(device: str, dtype: str, rows: int, hidden: int, shift: int) -> int:
    """Write into ``out`` tensors: the new residual over the old one, and the norm over ``x``.

    Return the number of calls.
    """
    done = 0
    with shotcast.Communicator(device=device, max_bytes=1 << 18, timeout_s=60) as comm:
        for seed, op in enumerate(wire.ALL_REDUCE_NORMS):
            operands = data(Case(dtype, rows, hidden), comm.world_size, seed, comm.device)
            mine, residual = operands.xs[comm.rank], operands.residual
            for algorithm, quantize in itertools.product(comm.candidates(operands.xs[0], op.label), QUANTIZATIONS):
                if algorithm == "vendor":
                    continue
                wanted = call(comm, op, mine, residual, operands, quantize, True, algorithm)
                x, given = shifted(mine, shift), shifted(residual, shift)
                if quantize:
                    scale = torch.empty(*x.shape[:-1], 1, device=comm.device) if quantize == "dynamic" else None
                    bytes_ = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=comm.device)
                    got = call(
                        comm, op, x, given, operands, quantize, True, algorithm, Fp8Normed(bytes_, scale, given, x)
                    )
                    assert got.quantized is bytes_
                    check(bytes_.float(), wanted.quantized.float(), (op, algorithm, quantize))
                    if scale is not None:
                        assert got.scale is scale
                        check(scale, wanted.scale, (op, algorithm, quantize))
                else:
                    got = call(comm, op, x, given, operands, "", True, algorithm, (x, given))
                assert got.normed is x
                assert got.new_residual is given
                check(x, wanted.normed, (op, algorithm, quantize, "normed"))
                check(given, wanted.new_residual, (op, algorithm, quantize, "new residual"))
                done += 1
        settle(comm)
    return done


def changing_calls(
    device: str, calls: int, most_rows: int, lengths: list[int], seed: int, dtypes: Sequence[str] = tuple(FLOATS)
) -> int:
    """Make fused calls of random form and size between plain ones, with stragglers, over all slot generations."""
    with shotcast.Communicator(device=device, max_bytes=4 << 20, timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        shared, own = random.Random(seed), random.Random(seed * 100 + rank)
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for number in range(calls):
            straggle(comm, own)
            dtype = shared.choice(dtypes)
            if shared.random() < 0.3:
                xs = inputs(shared.randrange(1, 3000), FLOATS[dtype], size, number, comm.device)
                algorithm = shared.choice(["one_shot", "two_shot"])
                wrong += differing(comm.all_reduce(xs[rank], algorithm=algorithm), reference.ordered_sum(xs))
                continue
            op = shared.choice(wire.ALL_REDUCE_NORMS)
            case = Case(dtype, shared.randrange(most_rows + 1), shared.choice(lengths))
            operands = data(case, size, number, comm.device)
            x, residual = operands.xs[rank], operands.residual
            wanted = reference.add_residual(reference.ordered_sum(operands.xs), residual)
            quantize, keeps = shared.choice([("", True), ("static", False), ("dynamic", True), ("dynamic", False)])
            algorithm = shared.choice([name for name in comm.candidates(x, op.label) if name != "vendor"] or ["auto"])
            got = call(comm, op, x, residual, operands, quantize, keeps, algorithm)
            wrong += differing(got.new_residual, wanted)
            if case.rows:
                plain = unfused(comm, op, x, residual, operands)
                if keeps:
                    wrong += differing(got.normed, plain.normed)
                if quantize:
                    quantized, scale = reference.quantize(
                        plain.normed, operands.scale if quantize == "static" else None
                    )
                    wrong += differing(got.quantized.float(), quantized.float()) + differing(got.scale, scale)
        assert int(wrong) == 0, f"{int(wrong)} values differ"
        settle(comm)
    return calls


def bits_of_every_algorithm(device: str, lengths: list[int]) -> list[bytes]:
    """Check that the norm has the same bits by each algorithm, and for each row alone as in the batch.

    Return the norms as bytes.
    """
    results = []
    with shotcast.Communicator(device=device, max_bytes=1 << 20, timeout_s=60) as comm:
        rank = comm.rank
        for dtype, hidden in itertools.product(FLOATS, lengths):
            operands = data(Case(dtype, 3, hidden), comm.world_size, hidden, comm.device)
            x, residual = operands.xs[rank], operands.residual
            wanted = unfused(comm, Op.ALL_REDUCE_RMS_NORM, x, residual, operands).normed
            for algorithm in comm.candidates(x, Op.ALL_REDUCE_RMS_NORM.label):
                if algorithm == "vendor":
                    continue
                got = call(comm, Op.ALL_REDUCE_RMS_NORM, x, residual, operands, "", True, algorithm).normed
                check(got, wanted, (dtype, hidden, algorithm))
                for row in range(3):
                    part = slice(row, row + 1)
                    got = call(
                        comm, Op.ALL_REDUCE_RMS_NORM, x[part], residual[part], operands, "", True, algorithm
                    ).normed
                    check(got, wanted[part], (dtype, hidden, algorithm, row))
            results.append(bytes(torch.nan_to_num(wanted.float()).cpu().numpy()))
        settle(comm)
    return results


def sentinels(device: str) -> int:
    """Check that rows, residuals and weights of sentinel words come out as NaN. Return the number of calls."""
    done = 0
    with shotcast.Communicator(device=device, max_bytes=1 << 18, timeout_s=100) as comm:
        for dtype, op in itertools.product(FLOATS.values(), wire.ALL_REDUCE_NORMS):
            whole = torch.full([2, 64 * dtype.itemsize], 0xFF, dtype=torch.uint8, device=comm.device)
            x, weight = whole.view(dtype), whole[0].view(dtype)
            operands = Data([x], x, weight, weight, torch.ones(1, device=comm.device))
            for algorithm in comm.candidates(x, op.label):
                got = call(comm, op, x, x, operands, "static", True, algorithm)
                for value in (got.new_residual, got.normed, got.quantized):
                    assert value.float().isnan().all(), (dtype, op, algorithm)
                done += 1
        settle(comm)
    return done


def graphs(replays: int, hidden: int) -> None:
    """Replay graphs of fused calls on changed inputs, with stragglers and eager calls between them. GPUs only."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        shared, own = random.Random(1), random.Random(rank)
        captured = []
        for op, rows in itertools.product(wire.ALL_REDUCE_NORMS, (1, 7, 64)):
            first = data(Case("bfloat16", rows, hidden), size, rows, comm.device)
            x, residual = first.xs[rank].clone(), first.residual.clone()
            for algorithm in comm.candidates(x, op.label):
                if algorithm == "vendor":
                    continue
                plain = torch.empty_like(x), torch.empty_like(residual)
                fp8 = Fp8Normed(
                    torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=comm.device),
                    torch.empty(rows, 1, device=comm.device),
                    torch.empty_like(residual),
                    None,
                )

                def both(
                    op: Op = op,
                    x: torch.Tensor = x,
                    residual: torch.Tensor = residual,
                    algorithm: str = algorithm,
                    plain: Any = plain,
                    fp8: Fp8Normed = fp8,
                    operands: Data = first,
                ) -> None:
                    call(comm, op, x, residual, operands, "", True, algorithm, plain)
                    call(comm, op, x, residual, operands, "dynamic", False, algorithm, fp8)

                both()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    both()
                    both()
                # keep the inputs too: the graph reads the weight
                captured.append((f"{op.label} {rows} {algorithm}", op, rows, x, residual, plain, fp8, graph, first))
        wrong = {name: torch.zeros(5, dtype=torch.int64, device=comm.device) for name, *_ in captured}
        for replay in range(replays):
            name, op, rows, x, residual, plain, fp8, graph, _ = shared.choice(captured)
            fresh = data(Case("bfloat16", rows, hidden), size, replay, comm.device)
            x.copy_(fresh.xs[rank])
            residual.copy_(fresh.residual)
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(300_000))
            graph.replay()
            wanted = unfused(comm, op, x, residual, fresh)
            quantized, scale = reference.quantize(wanted.normed)
            wrong[name] += torch.stack(
                [
                    differing(plain[0], wanted.normed),
                    differing(plain[1], wanted.new_residual),
                    differing(fp8.new_residual, wanted.new_residual),
                    differing(fp8.scale, scale),
                    differing(fp8.quantized.float(), quantized.float()),
                ]
            )
        found = {name: count.tolist() for name, count in wrong.items() if count.any()}
        assert not found, f"values of norm, residual, and FP8's residual, scale and bytes that differ: {found}"
        settle(comm)


# -- faults -----------------------------------------------------------------------------------------------------------


class Stopped(NamedTuple):
    """The outcome on one rank of a call that could not complete, and of the same call again."""

    error: BaseException | None
    took: float
    nan: dict[str, bool]
    again: BaseException | None
    again_s: float


def outputs_of(rows: int, hidden: int, device: torch.device) -> Fp8Normed:
    """Return outputs of zeros for a call to overwrite."""
    return Fp8Normed(
        torch.zeros(rows, hidden, device=device).to(torch.float8_e4m3fn),
        torch.zeros(rows, 1, device=device),
        torch.zeros(rows, hidden, device=device),
        torch.zeros(rows, hidden, device=device),
    )


def peer_has_stopped(comm: Communicator) -> bool:
    """Return whether a peer has stopped the call that this rank is late for."""
    executor: Any = comm._executor
    return bool(executor.fault()) if comm.topology.transport.name == "compiled" else executor.workspaces[0].stopped


def failing_call(comm: Communicator, op: Op, algorithm: str, operands: Data, x: torch.Tensor) -> Stopped:
    """Make one call that is expected to fail, twice."""
    rows, hidden = operands.residual.shape
    errors, times = [], []
    for _ in range(2):
        out = outputs_of(rows, hidden, comm.device)
        started = time.monotonic()
        error: BaseException | None = None
        try:
            call(comm, op, x, operands.residual, operands, "dynamic", True, algorithm, out)
            settle(comm)
        except shotcast.ShotcastError as caught:
            error = caught
        errors.append(error)
        times.append(time.monotonic() - started)
        if len(errors) == 1:
            nan = {name: bool(value.float().isnan().all()) for name, value in out._asdict().items()}
    return Stopped(errors[0], times[0], nan, errors[1], times[1])


def stopped(device: str, op: Op, algorithm: str, victim: int, fault: int | str, timeout_s: float) -> Stopped | None:
    """Send signal ``fault`` to rank ``victim``, or make it late, while the others make a call.

    After a late rank, all ranks reset, and later calls must give the right results.
    """
    comm = shotcast.Communicator(device=device, timeout_s=timeout_s, max_bytes=1 << 18)
    operands = data(Case("float32", 3, 64), comm.world_size, 1, comm.device)
    x = operands.xs[comm.rank]
    for _ in range(4):  # write words into all generations
        wanted = call(comm, op, x, operands.residual, operands, "dynamic", True, algorithm)
    settle(comm)
    comm._host.barrier()
    if comm.rank == victim:
        if isinstance(fault, int):
            os.kill(os.getpid(), fault)
            time.sleep(600)
        while not peer_has_stopped(comm):
            time.sleep(0.01)
    time.sleep(0.2)
    outcome = failing_call(comm, op, algorithm, operands, x)
    if isinstance(fault, str):
        comm.reset()
        for _ in range(4):
            got = call(comm, op, x, operands.residual, operands, "dynamic", True, algorithm)
            for name in ("new_residual", "normed", "scale"):
                check(getattr(got, name), getattr(wanted, name), ("after reset", name))
            check(got.quantized.float(), wanted.quantized.float(), "after reset")
        settle(comm)
    comm.close()
    return outcome


def silent_between_shots(victim: int, programs: int, timeout_s: float) -> tuple[BaseException | None, float]:
    """Stop rank ``victim`` when ``programs`` of a two-shot have pushed: its part of its peers' sums has left by then.

    The victim goes on when its peers have given up. Interpreter only, which runs programs one after the other.
    """
    from shotcast.transport.triton import fused_two_shot, sync

    pushed = -1

    def release(pdl: Any) -> None:
        nonlocal pushed
        if pushed >= 0:
            pushed += 1
        if pushed == programs:
            comm._host.barrier()

    # Patch before the first call, as the interpreter keeps what it has read. Frequent checks notice a deadline in time.
    sync.POLLS_PER_CHECK = 8
    fused_two_shot.release_next_kernel = sync.release_next_kernel = release
    with shotcast.Communicator(device="cpu", timeout_s=timeout_s, max_bytes=1 << 18, exclusive=True) as comm:
        op, rows = Op.ALL_REDUCE_RMS_NORM, comm.world_size  # one row for each rank
        operands = data(Case("float32", rows, 64), comm.world_size, 1, comm.device)
        x = operands.xs[comm.rank]
        call(comm, op, x, operands.residual, operands, "", True, "two_shot")
        comm._host.barrier()
        if comm.rank == victim:
            pushed = 0
        error = None
        started = time.monotonic()
        try:
            call(comm, op, x, operands.residual, operands, "", True, "two_shot")
        except shotcast.ShotcastError as caught:
            error = caught
        took = time.monotonic() - started
        if comm.rank != victim:
            comm._host.barrier()
        return error, took


def mismatched(device: str, what: str) -> tuple[BaseException | None, list[str]]:
    """Have the last rank request something else of as many elements. Return the error, and its fields.

    After a reset, the results must be right.
    """
    with shotcast.Communicator(device=device, timeout_s=100, max_bytes=1 << 18) as comm:
        odd = comm.rank == comm.world_size - 1
        operands = data(Case("float32", 2, 64), comm.world_size, 1, comm.device)
        x, residual = operands.xs[comm.rank], operands.residual
        op = Op.ALL_REDUCE_RMS_NORM
        usual = (op, "static", True)
        others = {
            "quantize": (op, "dynamic", True),
            "normed": (op, "static", False),
            "weight": usual,
            "kind": (Op.ALL_REDUCE_LAYER_NORM, "static", True),
            "hidden": usual,
        }
        if odd and what == "weight":
            operands = operands._replace(weight=operands.weight.half())
        rows, whole = (x, residual), operands
        if odd and what == "hidden":
            rows, operands = (x.view(-1, 32), residual.view(-1, 32)), operands._replace(weight=operands.weight[:32])
        error: BaseException | None = None
        try:
            asked, quantize, keeps = others[what] if odd else usual
            call(comm, asked, *rows, operands, quantize, keeps, "auto")
            settle(comm)
        except shotcast.ShotcastError as caught:
            error = caught
        comm.reset()
        operands = whole._replace(weight=whole.weight.float())
        got = call(comm, op, x, residual, operands, "", True, "auto")
        check(got.normed, unfused(comm, op, x, residual, operands).normed, "after reset")
        settle(comm)
        return error, list(getattr(error, "fields", []))
