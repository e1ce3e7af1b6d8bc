"""Kernels of a GPU that pass over rows: norms, activations, rotation, embeddings, logits and sampling, each alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from gpu_calibration.case import Case, copies_beyond_caches, off_by

from shotcast.collectives.communicator import Communicator
from shotcast.cost.inference import FEW_ROWS, FP8
from shotcast.layers.parallel import Parallel
from shotcast.planner.calibration import rotation_bytes

ROWS = (1, 4, 16, 64, 256, 512, 2048)
HIDDEN = (4096, 8192, 16384)
COLUMNS = (3584, 14336, 28672, 53248)
"""Columns between the products of a feed-forward network, of a rank."""
HEADS = ((32, 8), (64, 8), (128, 8), (16, 2), (8, 1))
VOCAB = 128256
_HEAD_DIM = 128
_EPS = 1e-5
_BLOCK_SLOTS = 4096
_Made = tuple[int, Callable[[int], Any], Callable[[], None]]
"""Bytes read and written, the call, and the check."""


class PassShape(NamedTuple):
    """A kernel over rows of one width, or of a number of heads, for some numbers of rows.

    Attributes:
        name: one of :func:`pass_shapes`.
        width: elements of a row; of rotations, query heads.
        kv_heads: of rotations.
        rows: the numbers of rows.
    """

    name: str
    width: int
    kv_heads: int
    rows: tuple[int, ...]

    def cases(self, device: torch.device, filled: bool) -> Iterator[Case]:
        """Yield the kernel for each number of rows."""
        with Communicator(device=device.type, exclusive=True) as comm:
            parallel = Parallel(comm)
            for rows in self.rows:
                copies = copies_beyond_caches(4 * rows * self.width) if filled else 1
                make = getattr(self, f"_{self.name.removesuffix(FP8)}")
                fp8 = {"fp8": True} if self.name.endswith(FP8) else {}
                nbytes, call, check = make(rows, min(copies, 1024), device, parallel, **fp8)
                row = {"kernel": "rows_pass", "name": self.name, "rows": rows, "width": self.width}
                if self.kv_heads:
                    row |= {"kv_heads": self.kv_heads}
                yield Case(row | {"nbytes": nbytes}, min(copies, 1024), call, check)

    def _norm(self, rows: int, copies: int, device: torch.device, parallel: Parallel, fp8: bool = False) -> _Made:
        x, residual = (_normal(copies, rows, self.width, device) for _ in range(2))
        weight = torch.ones(self.width, device=device, dtype=torch.bfloat16)
        norm = parallel.reduce_norm_float8 if fp8 else parallel.reduce_norm

        def check() -> None:
            exact = F.rms_norm(x[0].float() + residual[0].float(), weight.shape, None, _EPS)
            found, _ = norm(x[0].clone(), residual[0].clone(), weight, _EPS)
            _compare("norm", found, exact, 0.0, 2.0**-6)

        return (7 if fp8 else 8) * rows * self.width, lambda turn: norm(x[turn], residual[turn], weight, _EPS), check

    def _activation(self, rows: int, copies: int, device: torch.device, parallel: Parallel, fp8: bool = False) -> _Made:
        from shotcast.kernels.triton import activations

        x = _normal(copies, rows, 2 * self.width, device)
        activate = partial(activations.quantize, gated=True) if fp8 else activations.gate

        def check() -> None:
            gate, up = x[0].float().chunk(2, 1)
            _compare("activation", activate(x[0]), F.silu(gate) * up, 1e-3, 2.0**-7)

        return (5 if fp8 else 6) * rows * self.width, lambda turn: activate(x[turn]), check

    def _quantization(self, rows: int, copies: int, device: torch.device, parallel: Parallel) -> _Made:
        from shotcast.kernels.triton import activations

        x = _normal(copies, rows, self.width, device)

        def check() -> None:
            _compare("quantization", activations.quantize(x[0]), x[0].float(), 0.0, 0.0)

        return 3 * rows * self.width, lambda turn: activations.quantize(x[turn]), check

    def _rotation(self, rows: int, copies: int, device: torch.device, parallel: Parallel) -> _Made:
        from shotcast.kernels.triton import rope

        heads, kv_heads = self.width, self.kv_heads
        copies = -(-copies // _HEAD_DIM)
        qkv = _normal(copies, rows, (heads + 2 * kv_heads) * _HEAD_DIM, device)
        angles = torch.randn(rows, _HEAD_DIM // 2, device=device)
        cosines, sines = angles.cos(), angles.sin()
        positions = torch.arange(rows, device=device)
        slots = torch.randperm(max(rows, _BLOCK_SLOTS), device=device)[:rows]
        keys, values = (_normal(1, max(rows, _BLOCK_SLOTS), kv_heads * _HEAD_DIM, device)[0] for _ in range(2))
        keys, values = keys.view(-1, kv_heads, _HEAD_DIM), values.view(-1, kv_heads, _HEAD_DIM)
        queries = torch.empty(rows, heads, _HEAD_DIM, device=device, dtype=torch.bfloat16)

        def call(turn: int) -> None:
            rope.rotate_into_cache(qkv[turn % copies], cosines, sines, positions, slots, keys, values, queries)

        def check() -> None:
            call(0)
            x = qkv[0].view(rows, -1, _HEAD_DIM).float()
            low, high = x[:, : heads + kv_heads].chunk(2, 2)
            turn_cosines, turn_sines = cosines[:, None], sines[:, None]
            turned = (low * turn_cosines - high * turn_sines, high * turn_cosines + low * turn_sines)
            exact = torch.cat(turned, 2)
            off_by("rotation of queries", queries, exact[:, :heads], 1e-2, 2.0**-7)
            off_by("rotation of keys", keys[slots], exact[:, heads:], 1e-2, 2.0**-7)
            off_by("entry of values", values[slots], x[:, heads + kv_heads :], 0.0, 0.0)

        return int(rotation_bytes(rows, heads, kv_heads, _HEAD_DIM, 2)), call, check

    def _embedding(self, rows: int, copies: int, device: torch.device, parallel: Parallel) -> _Made:
        from shotcast.kernels.triton.embedding import embed

        weight = _normal(1, VOCAB, self.width, device)[0]
        tokens = torch.randint(VOCAB, (copies, rows), device=device)

        def check() -> None:
            off_by("embedding", embed(tokens[0], weight, 0), weight[tokens[0]].float(), 0.0, 0.0)

        return 4 * rows * self.width, lambda turn: embed(tokens[turn], weight, 0), check

    def _logits(self, rows: int, copies: int, device: torch.device, parallel: Parallel) -> _Made:
        from shotcast.kernels.triton.logits import concat_columns

        parts = _normal(copies, 1, rows * self.width, device)[:, 0]
        starts = torch.tensor([0, self.width], dtype=torch.int32, device=device)
        values = torch.empty(rows, self.width, device=device)
        best = torch.empty(rows, 2, dtype=torch.int64, device=device)

        def call(turn: int) -> None:
            concat_columns(parts[turn], [self.width], starts, values, best)

        def check() -> None:
            call(0)
            exact = parts[0].view(rows, -1).float()
            off_by("logits", values, exact, 0.0, 0.0)
            off_by("the largest logits", exact.gather(1, best[:, :1]), exact.amax(1, keepdim=True), 0.0, 0.0)

        return 6 * rows * self.width, call, check

    def _sampling(self, rows: int, copies: int, device: torch.device, parallel: Parallel) -> _Made:
        from shotcast.kernels.triton import sampling

        logits = torch.randn(max(2, copies // 2), rows, self.width, device=device)
        best = torch.stack((logits[0].argmax(1), torch.ones(rows, dtype=torch.int64, device=device)), 1)
        integers = torch.full((rows, 5), -1, dtype=torch.int32, device=device)  # no row is constrained
        integers[:, 0] = torch.arange(rows)
        integers[:, 1] = 0  # top_k
        integers[:, 2:4] = torch.randint(1 << 30, (rows, 2))
        reals = torch.tensor([[1.0, math.inf, 0.0, 0.0, math.inf, 1.0]] * rows, device=device)
        state = torch.tensor([sampling.INITIAL_STATE] * rows, device=device)
        top_p = torch.ones(rows, dtype=torch.float64, device=device)
        metadata = sampling.SamplingMetadata(integers, reals, top_p, state)
        last = torch.zeros(rows, dtype=torch.int64, device=device)

        def call(turn: int) -> torch.Tensor:
            return sampling.sample(logits[turn % len(logits)], best, metadata, None, None, last, False)

        def check() -> None:
            tokens = call(0)[:, 0]
            if not (int(tokens.min()) >= 0 and int(tokens.max()) < self.width and torch.equal(tokens, last)):
                raise ArithmeticError("sampling gives tokens that are none")

        return 4 * rows * self.width, call, check


def pass_shapes(fp8: bool) -> list[PassShape]:
    """Return the kernels over rows of a GPU, with or without those of FP8."""
    many = tuple(rows for rows in ROWS if rows > FEW_ROWS)
    heads = tuple(rows for rows in ROWS if rows <= 512)
    found = [PassShape(name, width, 0, ROWS) for name in ("norm", "embedding") for width in HIDDEN]
    found += [PassShape("activation", width, 0, many) for width in COLUMNS]
    found += [PassShape("rotation", *each, ROWS) for each in HEADS]
    found += [PassShape(name, VOCAB, 0, heads) for name in ("logits", "sampling")]
    if fp8:
        found += [PassShape("norm_fp8", width, 0, ROWS) for width in HIDDEN]
        found += [PassShape("quantization", width, 0, ROWS) for width in (*HIDDEN, *COLUMNS)]
        found += [PassShape("activation_fp8", width, 0, many) for width in COLUMNS]
    return found


def _compare(name: str, found: Any, exact: torch.Tensor, allowed: float, rounding: float) -> None:
    """Compare a tensor, or values in FP8 with the scale of each row, whose rounding is that of their type."""
    if isinstance(found, torch.Tensor):
        off_by(name, found, exact, allowed, rounding)
    else:
        values, scale = found
        off_by(f"{name} in FP8", values.float() * scale, exact, 8 * scale, 2.0**-4)


def _normal(*shape_and_device: Any) -> torch.Tensor:
    *shape, device = shape_and_device
    return torch.randn(shape, device=device, dtype=torch.bfloat16)
