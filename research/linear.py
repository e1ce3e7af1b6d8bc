"""Matrix products of a decode step on one GPU, compared with PyTorch.

The kernels are ``shotcast.kernels.triton.gemv`` (1 and 2 rows) and ``shotcast.kernels.triton.skinny_gemm``; the shapes
are those of Llama 3.1 on four ranks: 8B and 70B in bfloat16, 405B in FP8.

    python research/linear.py [--models 8b,70b,405b] [--rows 1,2,...] [--quick] [--json FILE]

A time is that of one product in a captured graph of many, which take turns on weights that no cache holds, as in
decoding. A product whose error against float32 exceeds rounding is reported and not timed. GB/s counts weights only;
the figure of ``copy`` is the bandwidth that copying memory reaches, with bytes read and bytes written.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from gpu_times import seconds_each
from gpu_timing import copy_gbps, write
from rich.console import Console
from rich.table import Table

from shotcast.bench import kernels
from shotcast.device.triton.intrinsics import num_sms, shared_memory_per_sm
from shotcast.kernels.triton import activations, gemv, skinny_gemm
from shotcast.kernels.triton.gemv import GemvConfig
from shotcast.kernels.triton.skinny_gemm import SkinnyGemmConfig
from shotcast.layers import quantized
from shotcast.layers.quantized import Float8Rows

# (outputs, inputs) of a rank; gate_up is measured with and without silu(gate) * up
SHAPES = {
    "8b": {
        "qkv": (1536, 4096),
        "o": (4096, 1024),
        "gate_up": (7168, 4096),
        "down": (4096, 3584),
        "head": (32064, 4096),
    },
    "70b": {"qkv": (2560, 8192), "o": (8192, 2048), "gate_up": (14336, 8192), "down": (8192, 7168)},
    "405b": {"qkv": (4608, 16384), "o": (16384, 4096), "gate_up": (26624, 16384), "down": (16384, 13312)},
}
FP8_MODELS = ("405b",)
SILU = "+silu"
BYTES_BETWEEN = 200_000_000
"""Bytes of weights read between two uses of the same weights: several times the L2 cache."""
CALLS = 24
LIBRARY = "library"
CHOSEN = "chosen"


def off_by(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, allowed: float) -> float:
    """Return the largest error, relative to ``allowed`` times ``size`` (the sum of absolute products) and roundings."""
    return float(((found.float() - exact).abs() / (size * allowed + exact.abs() * 2**-7 + 1e-6)).max())


class Product:
    """A matrix of weights, with as many copies as it takes to exceed every cache."""

    def __init__(self, model: str, name: str):
        self.model, self.name, self.fp8 = model, name, model in FP8_MODELS
        self.gated = name.endswith(SILU)
        self.outputs, self.inputs = SHAPES[model][name.removesuffix(SILU)]
        self.nbytes = self.outputs * self.inputs * (1 if self.fp8 else 2)
        self.count = max(2, -(-BYTES_BETWEEN // self.nbytes))
        generator = torch.Generator("cuda").manual_seed(self.outputs + self.inputs)
        shape = self.outputs, self.inputs
        first = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        self.scale = None
        if self.fp8:
            first, self.scale = quantized.quantize(first)
        self.weights = [first] + [first.clone() for _ in range(self.count - 1)]
        self.counters = skinny_gemm.new_counters(first)

    def implementations(
        self, rows: int, quick: bool
    ) -> Iterator[tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]]:
        yield LIBRARY, self.by_library
        if rows > skinny_gemm.MAX_ROWS:
            return
        yield CHOSEN, self.by_own(rows, None)
        if not quick:
            for launch in launches(rows, *self.weights[0].shape, self.fp8):
                yield described(launch), self.by_own(rows, launch)

    def by_own(
        self, rows: int, launch: GemvConfig | SkinnyGemmConfig | None
    ) -> Callable[[torch.Tensor, int], torch.Tensor]:
        if rows <= gemv.MAX_ROWS:
            assert not isinstance(launch, SkinnyGemmConfig)
            return lambda x, turn: gemv.linear(x, self.weights[turn], self.scale, None, self.gated, launch)
        assert not isinstance(launch, GemvConfig)

        def call(x: torch.Tensor, turn: int) -> torch.Tensor:
            values, x_scale = activations.quantize(x) if self.fp8 else (x, None)
            return skinny_gemm.linear(
                values, self.weights[turn], self.counters, x_scale, self.scale, None, self.gated, launch
            )

        return call

    def by_library(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        if self.scale is not None:
            both = quantized.scaled_matmul(
                Float8Rows(*activations.quantize(x)), Float8Rows(self.weights[turn], self.scale)
            )
        else:
            both = F.linear(x, self.weights[turn])
        return activations.gate(both) if self.gated else both

    def measure(self, rows: int, quick: bool) -> Iterator[dict[str, Any]]:
        generator = torch.Generator("cuda").manual_seed(rows)
        x = torch.randn(rows, self.inputs, generator=generator, device="cuda").bfloat16()
        wide = self.weights[0].float()
        if self.scale is not None:
            wide *= self.scale
        exact, size = x.float() @ wide.T, x.float().abs() @ wide.abs_().T
        del wide
        if self.gated:
            (gate, up), (gate_size, up_size) = exact.chunk(2, 1), size.chunk(2, 1)
            exact, size = F.silu(gate) * up, 1.1 * gate_size * up.abs() + gate.abs() * up_size
        for implementation, call in self.implementations(rows, quick):
            row = {"model": self.model, "name": self.name, "rows": rows, "outputs": self.outputs, "inputs": self.inputs}
            row |= {"contender": implementation}
            try:
                # the error of x in FP8 is up to 1/16; that of float32 sums is far below 2^-12
                rounded = self.fp8 and (implementation == LIBRARY or rows > gemv.MAX_ROWS)
                off = off_by(call(x, 0), exact, size, 2**-4 if rounded else 2**-12)
                if not off <= 1:
                    raise ArithmeticError(f"the error is {off:.3g} times the allowed one")
                taken = seconds_each(lambda turn, call=call: call(x, turn), self.count, CALLS)
                row |= {"us": taken * 1e6, "gbps": self.nbytes / taken / 1e9}
            except Exception as error:  # a launch that does not fit or gives wrong results is a result too
                row |= {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            yield row


def launches(rows: int, outputs: int, inputs: int, fp8: bool) -> list[GemvConfig | SkinnyGemmConfig]:
    """Return the configurations worth measuring; those of several rows are for one to three programs per SM."""
    item = 1 if fp8 else 2
    if rows <= gemv.MAX_ROWS:
        warp_columns = 512 // item  # columns that a warp loads with 16 bytes a lane
        forms = ((2, 4, 1), (4, 4, 1), (8, 4, 1), (4, 2, 1), (4, 4, 2), (2, 8, 1), (4, 8, 1))
        return [GemvConfig(tile, warp_columns * warps * steps, warps) for tile, warps, steps in forms]
    device = torch.device("cuda", 0)
    configs: set[SkinnyGemmConfig] = set()
    for programs_per_sm in (1, 2, 3):
        largest = skinny_gemm.max_split_k(outputs, inputs, item, programs_per_sm * num_sms(device))
        stages = skinny_gemm.max_stages(rows, programs_per_sm, shared_memory_per_sm(device))
        configs |= {SkinnyGemmConfig(stages, split_k) for split_k in (1, max(1, largest - 1), largest)}
    return sorted(configs, key=described)


def described(launch: GemvConfig | SkinnyGemmConfig) -> str:
    if isinstance(launch, GemvConfig):
        return f"{launch.tile}x{launch.columns} w{launch.warps}"
    return f"{launch.stages} stages, {launch.split_k} parts"


def compile_one(rows: int, fp8: bool, gated: bool, launch: GemvConfig | SkinnyGemmConfig) -> None:
    """Compile into Triton's cache on disk; the compiled form depends on the launch, not on the shape."""
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    weight = torch.zeros(64, 4096, device="cuda", dtype=dtype)
    scale = torch.ones(64, device="cuda") if fp8 else None
    try:
        if isinstance(launch, GemvConfig):
            x = torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16)
            gemv.linear(x, weight, scale, None, gated, launch)
        else:
            x = torch.zeros(rows, 4096, device="cuda", dtype=dtype)
            x_scale = torch.ones(rows, 1, device="cuda") if fp8 else None
            skinny_gemm.linear(x, weight, skinny_gemm.new_counters(weight), x_scale, scale, None, gated, launch)
        torch.cuda.synchronize()
    except Exception as error:  # reported where it is measured
        print(f"{described(launch)}: {type(error).__name__}", file=sys.stderr)


def compile_all(models: list[str], rows: list[int]) -> None:
    forms = {
        (number, model in FP8_MODELS, gated, launch)
        for model in models
        for number in rows
        if number <= skinny_gemm.MAX_ROWS
        for gated in (False, True)
        for outputs, inputs in SHAPES[model].values()
        for launch in launches(number, outputs, inputs, model in FP8_MODELS)
    }
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, *form) for form in sorted(forms, key=str)]:
            done.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--quick", action="store_true", help="only the chosen launch and the library")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models, numbers = options.models.split(","), [int(number) for number in options.rows.split(",")]
    screen = Console(width=150)
    if not options.quick:
        compile_all(models, numbers)
    copied = copy_gbps()
    screen.print(f"copy {copied:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    view = Table("model", "product", "rows", "library us", "GB/s", "chosen us", "GB/s", "best us", "GB/s", "launch")
    for model in models:
        for name in (*SHAPES[model], f"gate_up{SILU}"):
            product = Product(model, name)
            for number in numbers:
                found = list(product.measure(number, options.quick))
                rows += found
                for row in found:
                    if "error" in row:
                        screen.print(f"{model} {name} {number} {row['contender']}: {row['error']}", style="red")
                best = min((row for row in found[1:] if "us" in row), key=lambda row: row["us"], default={})
                times = [
                    f"{row[key]:.{digits}f}" if key in row else "-"
                    for row in (found[0], found[1], best)
                    for key, digits in (("us", 2), ("gbps", 0))
                ]
                view.add_row(model, name, str(number), *times, str(best.get("contender", "-")))
    screen.print(view)
    if options.json is not None:
        made_by = kernels.of_modules("kernels.triton.gemv", "kernels.triton.skinny_gemm")
        write(options.json, rows, made_by, copy_gbps=copied)


if __name__ == "__main__":
    main()
