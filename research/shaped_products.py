"""Large matrix products on one GPU in blocks of many shapes and on few SMs, beside the vendor library's.

    python research/shaped_products.py [--shapes 8192x8192x8192,...] [--set tune|known] [--seconds 0.1] [--json FILE]

Shapes are m x n x k; the second operand is in memory as weights are, [n, k], or with a t at the end as [k, n]. All
contenders of a shape are checked against float32 and then timed in turn, in rounds of another order each: a time is
that of many calls back to back, the median over the rounds. Values are normally distributed, as their bits decide the
power that a product takes, and thereby the clock. Clock and power are the means of samples taken meanwhile. The time
after a rest is that of a few calls on a GPU that was idle for a moment, and may run at a higher clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import large_gemm as gemm
import torch
from gpu_timing import write
from large_gemm import GemmConfig
from matmuls import LibraryProduct, Product, ShapedProduct, sms_of
from occupancy import resident_blocks
from product_room import GreenProduct, blocks_per_sm, kernel_of, multiprocessor_of, room_beside_product, seen_kernels
from rich.console import Console
from rich.table import Table

from shotcast.device import fingerprint

SHAPES = "8192x8192x8192,8192x8192x8192t,4096x8192x8192,4096x8192x14336"
LIBRARY = "library"
LEFT = (8, 16, 24, 32)
"""SMs that products leave."""
ROUNDS = 5
WARM_UP_S = 0.5
REST_S, CALLS_AFTER_REST = 0.05, 4
CLOCK_INTERVAL_S = 0.01

Contender = tuple[str, Product]


def small_tiles() -> Iterator[GemmConfig]:
    """Yield the tiles of the publication, and its blocks padded until few fit on an SM."""
    yield from (GemmConfig(64, 64, tile_k, 3, 4) for tile_k in (32, 64))
    yield GemmConfig(64, 64, 32, 3, 4, padding_bytes=80 << 10)


def tuned() -> Iterator[GemmConfig]:
    """Yield the configurations that are worth measuring on all SMs."""
    yield from (GemmConfig(128, 256, 64, stages, 8) for stages in (3, 4))
    yield from (GemmConfig(256, 128, 64, stages, 8) for stages in (3, 4))
    yield from (GemmConfig(128, 256, 64, 3, 8, group=group) for group in (8, 32))
    yield from (GemmConfig(128, 128, 64, stages, warps) for stages, warps in ((3, 8), (6, 4)))
    yield from gemm.FAST_ON_FEW
    yield dataclasses.replace(gemm.FAST_ON_FEW[0], group=16)


def contenders(chosen: str, sms: int) -> Iterator[Contender]:
    yield LIBRARY, LibraryProduct()
    for config in (*(tuned() if chosen == "tune" else ()), *small_tiles()):
        yield str(config) + (f", groups of {config.group}" if config.group != 16 else ""), ShapedProduct(config)
    yield "ours", ShapedProduct()
    for left in LEFT:
        if chosen == "tune":
            yield from (
                (f"{config}, {left} SMs left", ShapedProduct(config, sms - left)) for config in gemm.FAST_ON_FEW
            )
        yield f"ours, {left} SMs left", ShapedProduct(sms=sms - left)
        yield f"library, carve-out of {left} SMs", LibraryProduct(left)
        yield f"library, green context beside {left} SMs", GreenProduct(left)


def operands(m: int, n: int, k: int, by_rows: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    a = torch.randn(m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    return a, weight.T.contiguous() if by_rows else weight.T


class Clocks:
    """Samples of the GPU's clock and power while a scope lasts."""

    def __init__(self) -> None:
        import pynvml  # only machines with GPUs have it

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.samples: list[tuple[int, float]] = []

    def __enter__(self) -> Clocks:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(CLOCK_INTERVAL_S):
            clock = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
            self.samples.append((clock, self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3))


def seconds_each(call: Callable[[], Any], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def measure(shape: str, chosen: str, seconds: float) -> Iterator[dict[str, Any]]:
    m, n, k = map(int, shape.removesuffix("t").split("x"))
    a, b = operands(m, n, k, shape.endswith("t"))
    exact = a.float() @ b.float()
    allowed = exact.abs() * 2.0**-8 + 2.0**-8 * k**0.5
    flops = 2 * m * n * k
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    out = a.new_empty(m, n)
    for name, product in contenders(chosen, sms_of(a.device)):
        row: dict[str, Any] = {"shape": shape, "contender": name}
        rows[name] = row
        try:
            out.fill_(float("nan"))
            product(a, b, out)
            off = float(((out.float() - exact).abs() / allowed).max())
            if not off <= 1:
                raise ArithmeticError(f"the error is {off:.3g} times the allowed one")
            room = room_beside_product(product, a, b)
            row |= {"free_sms": room.free_sms, "beside": dataclasses.asdict(room.beside)}
            if isinstance(product, ShapedProduct):
                row |= resources(product, a, b)
            elif not isinstance(product, GreenProduct):
                row["seen"] = [kernel._asdict() for kernel in seen_kernels(functools.partial(product, a, b, out))]
            calls[name] = functools.partial(product, a, b, out)
        except Exception as failure:  # what does not fit or is wrong is a result too
            row["error"] = f"{type(failure).__name__}: {str(failure)[:200]}"
    del exact, allowed
    counts = {name: max(3, round(seconds / seconds_each(call, 2))) for name, call in calls.items()}
    until = time.monotonic() + WARM_UP_S
    while time.monotonic() < until:
        seconds_each(calls[LIBRARY], 10)
    times: dict[str, list[float]] = {name: [] for name in calls}
    rested: dict[str, list[float]] = {name: [] for name in calls}
    samples: dict[str, list[tuple[int, float]]] = {name: [] for name in calls}
    order = list(calls)
    for number in range(ROUNDS):
        random.Random(number).shuffle(order)
        for name in order:
            with Clocks() as clocks:
                times[name].append(seconds_each(calls[name], counts[name]))
            samples[name] += clocks.samples
    for number in range(ROUNDS):
        random.Random(number).shuffle(order)
        for name in order:
            time.sleep(REST_S)
            rested[name].append(seconds_each(calls[name], CALLS_AFTER_REST))
    for name, found in times.items():
        taken = statistics.median(found)
        clock, power = (statistics.fmean(values) for values in zip(*samples[name], strict=True))
        rows[name] |= {"us": taken * 1e6, "tflops": flops / taken / 1e12, "calls": counts[name]}
        rows[name]["us_after_rest"] = statistics.median(rested[name]) * 1e6
        rows[name] |= {"rounds_us": [each * 1e6 for each in found], "sm_mhz": round(clock), "watts": round(power)}
    yield from rows.values()


def resources(product: ShapedProduct, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    """Return what a block takes, and how many fit on an SM by the model and by the driver."""
    bound = product.bound(a, b)
    needs = kernel_of(bound)
    return {
        "registers": needs.registers,
        "threads": needs.threads,
        "shared_bytes": needs.shared_bytes,
        "blocks_per_sm": resident_blocks(needs, multiprocessor_of(a.device)),
        "blocks_per_sm_by_driver": blocks_per_sm(bound._run),
    }


def compile_one(config: GemmConfig) -> None:
    """Compile into Triton's cache on disk; the compiled form does not depend on the shape."""
    a, b = operands(256, 256, 256)
    try:
        ShapedProduct(config)(a, b)
        torch.cuda.synchronize()
    except Exception as error:  # reported where it is measured
        print(f"{config}: {type(error).__name__}")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--set", dest="chosen", choices=("tune", "known"), default="known")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each contender, in each round")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    asked = options().parse_args()
    screen = Console(width=150)
    if asked.chosen == "tune":
        with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_one, [*tuned(), *small_tiles()]))
    rows: list[dict[str, Any]] = []
    for shape in asked.shapes.split(","):
        found = list(measure(shape, asked.chosen, asked.seconds))
        rows += found
        base = next(row for row in found if row["contender"] == LIBRARY)["us"]
        view = Table(
            "contender",
            "us",
            "TFLOP/s",
            "library / it",
            "after rest",
            "MHz",
            "W",
            "blocks",
            "free SMs",
            "left",
            title=shape,
        )
        for row in sorted(found, key=lambda row: row.get("us", float("inf"))):
            if "error" in row:
                screen.print(f"{shape} {row['contender']}: {row['error']}", style="red")
                continue
            left = row["beside"]
            view.add_row(
                row["contender"],
                f"{row['us']:.1f}",
                f"{row['tflops']:.0f}",
                f"{base / row['us']:.3f}",
                f"{row['us_after_rest']:.0f}",
                str(row["sm_mhz"]),
                str(row["watts"]),
                str(row.get("blocks_per_sm", "-")),
                str(row["free_sms"]),
                f"{left['threads']} threads, {left['registers']} registers, {left['shared_bytes']} B",
            )
        screen.print(view)
    if asked.json is not None:
        sources = fingerprint.installed().with_module(gemm.__name__, Path(gemm.__file__))
        write(asked.json, rows, {gemm.__name__: fingerprint.of_module(sources, gemm.__name__)})


if __name__ == "__main__":
    main()
