"""Functions that the ranks of tests/collectives/test_bad_input.py run."""

from __future__ import annotations

import os
import resource
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast import ClosedError, ConfigError, ShotcastError, UnsupportedError
from shotcast.collectives import communicator
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.registry import registered

Call = Callable[[Communicator], Any]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def conjugated() -> torch.Tensor:
    return torch.tensor([1 + 2j]).conj()


def negated() -> torch.Tensor:
    return torch._neg_view(torch.ones(3))


def leaf(*shape: int) -> torch.Tensor:
    return x(*shape).requires_grad_()


# Each entry gives a name, the call, the error, and texts that its message must contain. A first dimension of 6 can be
# divided among 2 and 3 ranks.
CALLS: dict[str, tuple[Call, type[ShotcastError], tuple[str, ...]]] = {
    "no tensor": (lambda c: c.all_reduce([1.0]), ConfigError, ("x is a torch.Tensor, not list",)),
    "nothing, reduce_scatter": (lambda c: c.reduce_scatter(None), ConfigError, ("not NoneType",)),
    "nothing, all_gather": (lambda c: c.all_gather(None), ConfigError, ("not NoneType",)),
    "nothing, all_to_all": (lambda c: c.all_to_all(None), ConfigError, ("not NoneType",)),
    "nothing, broadcast": (lambda c: c.broadcast(None, 0), ConfigError, ("not NoneType",)),
    "nothing, send": (lambda c: c.send(None, (c.rank + 1) % c.world_size), ConfigError, ("not NoneType",)),
    "nothing, recv": (lambda c: c.recv(None, (c.rank + 1) % c.world_size), ConfigError, ("not NoneType",)),
    "nothing, explain": (lambda c: c.explain(None), ConfigError, ("not NoneType",)),
    "strided, recv": (
        lambda c: c.recv(x(4, 6).t(), (c.rank + 1) % c.world_size),
        ConfigError,
        ("not contiguous", "[6, 4]", "[1, 6]", ".contiguous()"),
    ),
    "strided, broadcast": (lambda c: c.broadcast(x(6)[::2], 0), ConfigError, ("not contiguous",)),
    "strided out": (
        lambda c: c.all_reduce(x(3), out=x(6)[::2]),
        ConfigError,
        ("out is not contiguous", "pass a contiguous tensor, or none"),
    ),
    "tensors without ranks": (
        lambda c: c.batch_send_recv([x(3)]),
        ConfigError,
        ("each message is (tensor, rank), not Tensor",),
    ),
    "other device": (lambda c: c.all_reduce(x(6).to("meta")), ConfigError, ("x lies on meta", "serves cpu")),
    "out on another device": (
        lambda c: c.all_reduce(x(6), out=x(6).to("meta")),
        ConfigError,
        ("out lies on meta", "serves cpu"),
    ),
    "sparse": (lambda c: c.all_reduce(x(6).to_sparse()), ConfigError, ("sparse_coo", "to_dense()")),
    "conjugated": (lambda c: c.all_gather(conjugated()), ConfigError, ("lazily", "resolve_conj()")),
    "negated": (lambda c: c.all_reduce(negated()), ConfigError, ("lazily", "resolve_neg()")),
    "quantised": (lambda c: c.all_reduce(quantised()), UnsupportedError, ("torch.qint8", "float32, float16, bfloat16")),
    "quantised, copied": (lambda c: c.broadcast(quantised(), 0), UnsupportedError, ("torch.qint8",)),
    "complex maximum": (
        lambda c: c.all_reduce(x(6, dtype=torch.complex64), reduction="max"),
        UnsupportedError,
        ("all_reduce(max) of complex64", "gloo"),
    ),
    "sum of float8": (
        lambda c: c.all_reduce(x(6).to(torch.float8_e5m2)),
        UnsupportedError,
        ("all_reduce(sum) of float8_e5m2", "gloo"),
    ),
    "sum of int16 by gloo": (
        lambda c: c.reduce_scatter(x(6, dtype=torch.int16), algorithm="vendor"),
        UnsupportedError,
        ("int16", "gloo"),
    ),
    "average of bool": (
        lambda c: c.all_reduce(x(6, dtype=torch.bool), reduction="avg"),
        UnsupportedError,
        ("avg takes floating-point tensors and int8, uint8, int16, int32, int64, not bool",),
    ),
    "or of floats": (
        lambda c: c.all_reduce(x(6), reduction=dist.ReduceOp.BOR),
        UnsupportedError,
        ("bor takes integers and bool, not float32",),
    ),
    "sum with a factor": (
        lambda c: c.all_reduce(x(6), reduction=dist._make_nccl_premul_sum(2.0)),
        ConfigError,
        ("PREMUL_SUM is not served", "multiply x"),
    ),
    "no reduction": (lambda c: c.reduce_scatter(x(6), reduction=3), ConfigError, ("unknown reduction 3",)),
    "out of another shape": (
        lambda c: c.all_reduce(x(6), out=x(7)),
        ConfigError,
        ("[6] of torch.float32", "it is [7]"),
    ),
    "out of another rank": (lambda c: c.all_reduce(x(6), out=x(6, 1)), ConfigError, ("out must be [6]",)),
    "out of another dtype": (
        lambda c: c.all_reduce(x(6), out=x(6).double()),
        ConfigError,
        ("out must be [6] of torch.float32", "torch.float64"),
    ),
    "out behind the input": (
        lambda c: (lambda y: c.all_reduce(y[:-1], out=y[1:]))(x(7)),
        ConfigError,
        ("share memory",),
    ),
    "out before the input": (
        lambda c: (lambda y: c.all_reduce(y[4:], out=y[:-4], algorithm="one_shot"))(x(10)),
        ConfigError,
        ("out begins -16 bytes behind x", "all of it"),
    ),
    "out of a reduce over the input": (
        lambda c: (lambda y: c.reduce(y[:-1], c.rank, out=y[1:]))(x(7)),
        ConfigError,
        ("share memory",),
    ),
    "another part of the input": (
        lambda c: (lambda y: c.reduce_scatter(y, out=y.chunk(c.world_size)[c.rank - 1]))(x(6 * c.world_size)),
        ConfigError,
        ("the rank's own part, from byte",),
    ),
    "half of the own part": (
        lambda c: (lambda y: c.all_gather(y[c.rank * 6 + 3 :][:6], out=y[: 6 * c.world_size]))(x(6 * c.world_size + 6)),
        ConfigError,
        ("the rank's own part, from byte",),
    ),
    "exchanged over the input": (
        lambda c: (lambda y: c.all_to_all(y[:-6], out=y[6:]))(x(6 * c.world_size + 6)),
        ConfigError,
        ("share memory",),
    ),
    "out of the input's shape": (lambda c: c.reduce_scatter(x(6), out=x(6)), ConfigError, ("out must be",)),
    "gathered into too little": (lambda c: c.all_gather(x(6), out=x(6)), ConfigError, ("out must be",)),
    "out with gradient": (lambda c: c.all_reduce(x(6), out=leaf(6)), ConfigError, ("out is written", "detach()")),
    "in place with gradient": (lambda c: (lambda y: c.all_reduce(y, out=y))(leaf(6)), ConfigError, ("requires grad",)),
    "root too high": (lambda c: c.broadcast(x(6), c.world_size), ConfigError, ("root is a rank in 0..", "not ")),
    "root below 0": (lambda c: c.broadcast(x(6), -1), ConfigError, ("root is a rank", "not -1")),
    "root no number": (lambda c: c.broadcast(x(6), "0"), ConfigError, ("root is a rank", "not '0'")),
    "dst too high": (lambda c: c.send(x(6), 9), ConfigError, ("dst is a rank", "not 9")),
    "src below 0": (lambda c: c.recv(x(6), -2), ConfigError, ("src is a rank", "not -2")),
    "to itself": (lambda c: c.send(x(6), c.rank), ConfigError, ("cannot send to itself",)),
    "from itself": (lambda c: c.recv(x(6), c.rank), ConfigError, ("cannot receive from itself",)),
    "too few sizes": (lambda c: c.all_gather(x(6), sizes=[6]), ConfigError, ("sizes must hold", "they are [6]")),
    "not my size": (lambda c: c.all_gather(x(6), sizes=[5] * c.world_size), ConfigError, ("sizes must hold", "and 6 ")),
    "negative size": (
        lambda c: c.all_gather(x(6), sizes=[6 if r == c.rank else -1 for r in range(c.world_size)]),
        ConfigError,
        ("numbers from 0 up",),
    ),
    "sizes no numbers": (lambda c: c.all_gather(x(1), sizes=[1.0] * c.world_size), ConfigError, ("sizes must hold",)),
    "not divisible": (lambda c: c.reduce_scatter(x(7)), ConfigError, ("reduce_scatter", "divided among", "[7]")),
    "not divisible, all_to_all": (lambda c: c.all_to_all(x(7, 6)), ConfigError, ("all_to_all", "[7, 6]")),
    "no first dimension": (lambda c: c.reduce_scatter(torch.tensor(1.0)), ConfigError, ("divided among", "[]")),
    "all_to_all in place": (lambda c: (lambda y: c.all_to_all(y, out=y))(x(6)), ConfigError, ("cannot work in place",)),
    "unknown algorithm": (
        lambda c: c.all_reduce(x(6), algorithm="tree"),
        ConfigError,
        ("unknown algorithm 'tree'", ", ".join(("auto", "lossless", *registered()))),
    ),
    "unknown algorithm to explain": (lambda c: c.explain(x(6), algorithm="tree"), ConfigError, ("'tree'",)),
    "unknown reduction": (
        lambda c: c.all_reduce(x(6), reduction="mean"),
        ConfigError,
        (
            "unknown reduction 'mean'",
            "sum, max, min, prod, avg, band, bor, bxor, and those of torch.distributed.ReduceOp",
        ),
    ),
    "unknown operation": (lambda c: c.explain(x(6), "sum"), ConfigError, ("unknown operation 'sum'", "all_reduce, ")),
    "ring of uneven parts": (
        lambda c: c.all_gather(x(c.rank), sizes=list(range(c.world_size)), algorithm="ring"),
        ConfigError,
        ("ring cannot serve this all_gather", "equal parts only"),
    ),
    "two-shot scatter": (
        lambda c: c.reduce_scatter(x(6), algorithm="two_shot"),
        ConfigError,
        ("there is no two_shot reduce_scatter; there is one_shot, ring",),
    ),
    "own sum of integers": (
        lambda c: c.all_reduce(x(6, dtype=torch.int64), algorithm="ring"),
        ConfigError,
        ("do more than sum float32, float16, bfloat16, and this is sum of int64",),
    ),
    "own maximum": (
        lambda c: c.all_reduce(x(6), algorithm="ring", reduction="max"),
        ConfigError,
        ("only one_shot and two_shot do more than sum", "this is max of float32"),
    ),
    "norm of float64": (
        lambda c: c.all_reduce_rms_norm(x(2, 6).double(), x(2, 6).double(), x(6)),
        UnsupportedError,
        ("float32, float16, bfloat16", "torch.float64"),
    ),
    "norm of two dtypes": (
        lambda c: c.all_reduce_rms_norm(x(2, 6), x(2, 6).half(), x(6)),
        UnsupportedError,
        ("they are torch.float32, torch.float16 and torch.float32",),
    ),
    "norm with another weight": (
        lambda c: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(2)),
        ConfigError,
        ("weight [hidden]", "[2, 6], [2, 6], [2]"),
    ),
    "norm with a weight of float64": (
        lambda c: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(6).double()),
        UnsupportedError,
        ("a weight of any of these", "torch.float32, torch.float32 and torch.float64"),
    ),
    "layer norm with a bias of another dtype": (
        lambda c: c.all_reduce_layer_norm(x(2, 6), x(2, 6), x(6), x(6).half()),
        ConfigError,
        ("all_reduce_layer_norm takes a bias of the weight's dtype and shape", "it is [6] of torch.float16"),
    ),
    "layer norm with a bias of another shape": (
        lambda c: c.all_reduce_layer_norm_fp8(x(2, 6), x(2, 6), x(6), x(3)),
        ConfigError,
        ("all_reduce_layer_norm_fp8 takes a bias", "[6] of torch.float32; it is [3]"),
    ),
    "norm with a negative eps": (
        lambda c: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(6), -1e-6),
        ConfigError,
        ("eps is a number from 0 up, not -1e-06",),
    ),
    "norm with eps no number": (
        lambda c: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(6), "1"),
        ConfigError,
        ("eps is a number from 0 up, not '1'",),
    ),
    "norm into one tensor": (
        lambda c: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(6), out=x(2, 6)),
        ConfigError,
        ("out is (normed, new_residual), not Tensor",),
    ),
    "norm into one tensor twice": (
        lambda c: (lambda y: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(6), out=(y, y)))(x(2, 6)),
        ConfigError,
        ("normed of out and new_residual of out are one tensor", "and normed all of x"),
    ),
    "norm into a part of x": (
        lambda c: (lambda y: c.all_reduce_rms_norm(y[:2], x(2, 6), x(6), out=(y[1:], x(2, 6))))(x(3, 6)),
        ConfigError,
        ("normed of out begins 24 bytes behind x, and overlaps it", "new_residual may be all of residual, and normed"),
    ),
    "norm into what ends in the residual": (
        lambda c: (lambda y: c.all_reduce_layer_norm(x(2, 6), y[1:], x(6), out=(x(2, 6), y[:2])))(x(3, 6)),
        ConfigError,
        ("new_residual of out begins -24 bytes behind residual, and overlaps it",),
    ),
    "norm into a result that overlaps the other": (
        lambda c: (lambda y: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(6), out=(y[1:], y[:2])))(x(3, 6)),
        ConfigError,
        ("normed of out begins 24 bytes behind new_residual of out, and overlaps it",),
    ),
    "norm into the weight": (
        lambda c: (lambda y: c.all_reduce_rms_norm(x(2, 6), x(2, 6), y[1], out=(y, x(2, 6))))(x(2, 6)),
        ConfigError,
        ("normed of out begins -24 bytes behind weight, and overlaps it",),
    ),
    "norm crosswise in place": (
        lambda c: (lambda y: c.all_reduce_rms_norm(x(2, 6), y, x(6), out=(y, x(2, 6))))(x(2, 6)),
        ConfigError,
        ("normed of out and residual are one tensor; new_residual may be all of residual",),
    ),
    "norm in FP8 into the bytes of x": (
        lambda c: (
            lambda y: c.all_reduce_rms_norm_fp8(
                y,
                x(2, 6),
                x(6),
                out=(y.view(torch.float8_e4m3fn).view(-1)[:12].view(2, 6), x(2, 1), x(2, 6), None),
            )
        )(x(2, 6)),
        ConfigError,
        ("quantized of out begins 0 bytes behind x, and overlaps it",),
    ),
    "norm into another shape": (
        lambda c: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(6), out=(x(2, 6), x(3, 6))),
        ConfigError,
        ("new_residual of out must be [2, 6] of torch.float32", "it is [3, 6]"),
    ),
    "norm into what has a gradient": (
        lambda c: c.all_reduce_rms_norm(x(2, 6), x(2, 6), x(6), out=(leaf(2, 6), x(2, 6))),
        ConfigError,
        ("in-place operation: normed of out is written", "detach()"),
    ),
    "norm by the ring": (
        lambda c: c.all_reduce_rms_norm(x(2, 8), x(2, 8), x(8), algorithm="ring"),
        ConfigError,
        ("there is no ring all_reduce_rms_norm; there is one_shot, two_shot",),
    ),
    "FP8 by two scales": (
        lambda c: c.all_reduce_rms_norm_fp8(x(2, 6), x(2, 6), x(6), scale=x(2)),
        ConfigError,
        ("scale is one float32, or None for one a row; it is [2] of torch.float32",),
    ),
    "FP8 by a scale of another dtype": (
        lambda c: c.all_reduce_rms_norm_fp8(x(2, 6), x(2, 6), x(6), scale=x(1).double()),
        ConfigError,
        ("it is [1] of torch.float64",),
    ),
    "FP8 by a number": (
        lambda c: c.all_reduce_rms_norm_fp8(x(2, 6), x(2, 6), x(6), scale=0.5),
        ConfigError,
        ("scale is a torch.Tensor, not float",),
    ),
    "FP8 into no norm": (
        lambda c: c.all_reduce_rms_norm_fp8(
            x(2, 6), x(2, 6), x(6), with_normed=True, out=(x(2, 6).to(torch.float8_e4m3fn), x(2, 1), x(2, 6), None)
        ),
        ConfigError,
        ("normed of out must be [2, 6] of torch.float32; it is None",),
    ),
    "FP8 into integers": (
        lambda c: c.all_reduce_rms_norm_fp8(
            x(6, 8), x(6, 8), x(8), out=(x(6, 8).to(torch.uint8), x(6, 1), x(6, 8), None)
        ),
        ConfigError,
        ("quantized of out must be [6, 8] of torch.float8_e4m3fn; it is [6, 8] of torch.uint8",),
    ),
    "FP8 into one scale": (
        lambda c: c.all_reduce_rms_norm_fp8(
            x(2, 6), x(2, 6), x(6), out=(x(2, 6).to(torch.float8_e4m3fn), x(1), x(2, 6), None)
        ),
        ConfigError,
        ("scale of out must be [2, 1] of torch.float32; it is [1]",),
    ),
    "norm without a weight": (lambda c: c.all_reduce_rms_norm(x(6), x(6), None), ConfigError, ("weight is a torch",)),
    "uneven parts into too little": (
        lambda c: c.all_gather(x(6), out=x(6), sizes=[6] * c.world_size),
        ConfigError,
        ("all_gather: out must be",),
    ),
    "own rows into too little": (
        lambda c: c.all_to_all(x(c.world_size), x(1), input_sizes=[1] * c.world_size, output_sizes=[1] * c.world_size),
        ConfigError,
        ("all_to_all: out must be",),
    ),
    "fewer SMs than none": (lambda c: c.all_reduce(x(6), sms=-1), ConfigError, ("sms is a whole number", "not -1")),
    "messages to nobody": (lambda c: c.batch_send_recv([(x(6), 9)]), ConfigError, ("dst is a rank", "not 9")),
    "messages to itself": (lambda c: c.batch_send_recv([(x(6), c.rank)]), ConfigError, ("with itself",)),
    "list with no tensor": (lambda c: c.all_reduce_coalesced([x(6), 3]), ConfigError, ("x 1 is a torch.Tensor",)),
    "gathered at nobody": (lambda c: c.gather(x(6), 9), ConfigError, ("root is a rank",)),
    "scattered from nobody": (lambda c: c.scatter(x(6), 9), ConfigError, ("root is a rank",)),
    "timeout 0": (lambda c: c.set_timeout(0), ConfigError, ("above 0, not 0",)),
    "timeout no number": (lambda c: c.set_timeout("1"), ConfigError, ("not '1'",)),
}


class _Recorder:
    """A communicator that keeps the name of the method called last."""

    def __init__(self, comm: Communicator):
        self._comm, self.called = comm, ""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._comm, name)
        if callable(value):
            self.called = name
        return value


def every_bad_call() -> int:
    """Check that each bad call is refused on all ranks, by its name, and that a good call after it succeeds.

    Return the number of calls.
    """
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        size = comm.world_size
        recorder: Any = _Recorder(comm)
        for number, (what, (call, kind, texts)) in enumerate(CALLS.items()):
            with pytest.raises(ShotcastError) as caught:
                call(recorder)
            named = "all_reduce" if what == "unknown algorithm to explain" else recorder.called
            assert named in str(caught.value), (what, str(caught.value))
            assert type(caught.value) is kind, (what, caught.value)
            for text in texts:
                assert text in str(caught.value), (what, text, str(caught.value))
            got = comm.all_reduce(torch.full([3], float(number)))
            assert got.tolist() == [float(number * size)] * 3, what
            # One rank alone is refused. The others may make the call before it, and lose nothing.
            if what in ("strided", "unknown algorithm", "root too high") and comm.rank == 0:
                with pytest.raises(ShotcastError):
                    call(comm)
        comm.check()
    return len(CALLS)


METHODS: dict[str, Call] = {
    "all_reduce": lambda c: c.all_reduce(x(6)),
    "all_reduce with gradient": lambda c: c.all_reduce(leaf(6)),
    "reduce_scatter": lambda c: c.reduce_scatter(x(6)),
    "all_gather": lambda c: c.all_gather(x(6)),
    "all_to_all": lambda c: c.all_to_all(x(6)),
    "broadcast": lambda c: c.broadcast(x(6), 0),
    "send": lambda c: c.send(x(6), 1 - c.rank),
    "recv": lambda c: c.recv(x(6), 1 - c.rank),
    "barrier": lambda c: c.barrier(),
    "all_reduce_rms_norm": lambda c: c.all_reduce_rms_norm(x(6), x(6), x(6)),
    "all_reduce_rms_norm_fp8": lambda c: c.all_reduce_rms_norm_fp8(x(6), x(6), x(6)),
    "all_reduce_layer_norm": lambda c: c.all_reduce_layer_norm(x(6), x(6), x(6)),
    "all_reduce_layer_norm_fp8": lambda c: c.all_reduce_layer_norm_fp8(x(6), x(6), x(6)),
    "integers": lambda c: c.all_reduce(x(6).long()),
    "check": lambda c: c.check(),
    "reset": lambda c: c.reset(),
    "split": lambda c: c.split(0),
}


def calls_after_close() -> None:
    comm = shotcast.Communicator(device="cpu", timeout_s=60)
    for name in ("all_reduce", "broadcast"):  # calls that the communicator remembers are refused as well
        METHODS[name](comm)
    comm.close()
    comm.close()
    for what, call in METHODS.items():
        with pytest.raises(ShotcastError, match="closed") as caught:
            call(comm)
        assert type(caught.value) is ClosedError, what
    with shotcast.Communicator(device="cpu") as again:
        assert again.all_reduce(x(3)).tolist() == [2.0] * 3


ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "max_bytes 0": ({"max_bytes": 0}, ("max_bytes is a whole number in 1..536870912, not 0",)),
    "max_bytes below 0": ({"max_bytes": -1}, ("not -1",)),
    "max_bytes too large": ({"max_bytes": 1 << 30}, ("1..536870912", "not 1073741824")),
    "max_bytes as text": ({"max_bytes": "1M"}, ("not '1M'",)),
    "allow_fp8 as number": ({"allow_fp8": 1}, ("allow_fp8 is True, False or None, not 1",)),
    "max_bytes as float": ({"max_bytes": 1.5}, ("not 1.5",)),
    "timeout 0": ({"timeout_s": 0}, ("timeout_s", "above 0, not 0")),
    "timeout below 0": ({"timeout_s": -1.0}, ("not -1.0",)),
    "timeout not a number": ({"timeout_s": float("nan")}, ("not nan",)),
    "timeout for ever": ({"timeout_s": float("inf")}, ("not inf",)),
    "timeout as text": ({"timeout_s": "30"}, ("not '30'",)),
    "no such device": ({"device": "tpu"}, ("device is cpu or cuda, not 'tpu'",)),
    "device of another kind": ({"device": "meta"}, ("device is cpu or cuda, not meta",)),
    "device no name": ({"device": 3.5}, ("not 3.5",)),
}
if not torch.cuda.is_available():
    ARGUMENTS["GPU without one"] = ({"device": "cuda"}, ("device cuda was asked for", "sees no GPU"))


def bad_arguments() -> None:
    for what, (arguments, texts) in ARGUMENTS.items():
        with pytest.raises(ConfigError) as caught:
            shotcast.Communicator(**({"device": "cpu"} | arguments))
        for text in texts:
            assert text in str(caught.value), (what, str(caught.value))
    with shotcast.Communicator(device="cpu") as comm:
        assert comm.all_reduce(x(3)).tolist() == [float(comm.world_size)] * 3


def construction_error(
    environments: Mapping[int, Mapping[str, str]], arguments: Mapping[int, Mapping[str, Any]] | None = None
) -> str:
    """Construct a communicator with each rank's own environment and arguments.

    Return the error, or "" if there is none.
    """
    rank = int(os.environ["RANK"])
    os.environ.update(environments.get(rank, {}))
    communicator.SETUP_TIMEOUT_S = 100.0
    try:
        with shotcast.Communicator(device="cpu", **(arguments or {}).get(rank, {})):
            return ""
    except ConfigError as error:
        return str(error)


def construction_error_with_little_memory(rank: int) -> str:
    """Run :func:`construction_error` where rank ``rank`` can have no more than 512 KiB of shared memory."""
    if os.environ["RANK"] == str(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, 512 << 10))
    return construction_error({})


def construction_error_of_two_devices() -> str:
    """Construct a communicator while rank 0 believes that it has a GPU, and return the error."""
    if os.environ["RANK"] == "0":
        dist.init_process_group("gloo")
        communicator.device_of = lambda device: torch.device("cuda", 0)
        torch.cuda.get_device_name = lambda device: "some GPU"
    with pytest.raises(ConfigError) as caught:
        shotcast.Communicator()
    return str(caught.value)


def construct_without_one_rank() -> tuple[str, tuple[int, ...], float]:
    communicator.SETUP_TIMEOUT_S = 2.0
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()
        return "", (), 0.0
    started = time.monotonic()
    with pytest.raises(shotcast.CollectiveTimeout) as caught:
        shotcast.Communicator(device="cpu")
    took = time.monotonic() - started
    dist.barrier()
    return caught.value.op, caught.value.missing, took


def not_a_member() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        with shotcast.Communicator(group, device="cpu") as comm:
            assert comm.world_size == 1
    else:
        with pytest.raises(ConfigError, match="not a member"):
            shotcast.Communicator(group, device="cpu")
    dist.barrier()  # Gloo may still be connecting to a rank that has ended
