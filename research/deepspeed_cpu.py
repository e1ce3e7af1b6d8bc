"""All-reduce between CPU ranks beside DeepSpeed's ``inference_all_reduce`` through shared memory, and Gloo.

    pip download deepspeed==0.19.8 --no-deps --no-binary :all: && tar xzf deepspeed-0.19.8.tar.gz
    python research/deepspeed_cpu.py --sources deepspeed-0.19.8 --world-size 2 --json deepspeed_all_reduce.json
    torchrun --nproc-per-node 2 research/deepspeed_cpu.py --sources deepspeed-0.19.8 --rounds 61 --seconds 0.01

The second line measures as users start ranks. (Run the first before: it builds the operator.)

DeepSpeed's operator is built from its sources by the compiler at hand, with the options that DeepSpeed builds it with.
All calls are in place, as DeepSpeed has no others, and made as a program makes them, from Python. Each is compared with
a sum in float64 before it is timed. The calls take turns in rounds; a time is the median of a rank, and of these the
largest; a ratio is the median of those of rounds. With two ranks on two cores each has a core of its own; more ranks
share them. "backend" is ``torch.distributed.all_reduce`` by our backend, and "torch" PyTorch's part of it: the same
with a group whose method does nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_timing import write
from rich.console import Console
from rich.table import Table

import shotcast
from shotcast.bench import kernels
from shotcast.errors import ConfigError
from shotcast.process_group.works import DONE
from shotcast.units import format_size, parse_size

SIZES = "4,64,1K,8K,64K,256K,1M,4M,16M"
SOURCES = ("comm/shm_interface.cpp", "comm/shm.cpp")
NAMES = ("deepspeed", "shotcast", "backend", "torch", "gloo")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="the folder of DeepSpeed's source distribution")
    parser.add_argument("--world-size", type=lambda text: [int(one) for one in text.split(",")], default=[2])
    parser.add_argument("--sizes", type=lambda text: [parse_size(one) for one in text.split(",")], default=None)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each call in each round")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


def built(sources: Path) -> Any:
    """Build DeepSpeed's operator, or load it where it has been built; return its module."""
    from torch.utils.cpp_extension import load

    code = sources / "csrc" / "cpu"
    if not code.is_dir():
        raise ConfigError(f"{sources} is no source distribution of DeepSpeed: it has no {code.relative_to(sources)}")
    folder = sources / "build"
    folder.mkdir(exist_ok=True)
    return load(
        "deepspeed_shm_comm",
        [str(code / name) for name in SOURCES],
        extra_include_paths=[str(code / name) for name in ("includes", "comm")],
        extra_cflags=["-O3", "-fopenmp", "-march=native"],
        extra_ldflags=["-fopenmp"],
        build_directory=str(folder),
    )


def microseconds(call: Callable[[], Any], count: int) -> np.ndarray:
    times_ns, clock = np.empty(count), time.perf_counter_ns
    for number in range(count):
        start = clock()
        call()
        times_ns[number] = clock() - start
    return times_ns / 1e3


def rows(sources: Path, sizes: list[int], dtype: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure; as one rank. Every rank returns all rows."""
    torch.set_num_threads(1)
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # which DeepSpeed asks for
    module = built(sources)
    dist.init_process_group("shotcast")
    gloo = dist.new_group(backend="gloo")
    idle = dist.new_group(backend="shotcast")
    idle.allreduce = lambda *_: DONE
    found = []
    with shotcast.Communicator(device="cpu") as comm:
        module.initialize(comm.world_size, comm.rank)
        element = getattr(torch, dtype)
        for nbytes in sizes:
            count = max(1, nbytes // element.itemsize)
            seeds = [torch.Generator().manual_seed(rank) for rank in range(comm.world_size)]
            inputs = [torch.randn(count, generator=seed).to(element) for seed in seeds]
            exact = torch.stack([one.double() for one in inputs]).sum(0)
            bound = torch.stack([one.double().abs() for one in inputs]).sum(0) * torch.finfo(element).eps * 2
            x = torch.empty(count, dtype=element)
            calls: dict[str, Callable[[], Any]] = {
                "deepspeed": lambda x=x: torch.ops.deepspeed.inference_all_reduce_(x),
                "shotcast": lambda x=x: comm.all_reduce(x, out=x),
                "backend": lambda x=x: dist.all_reduce(x),
                "torch": lambda x=x: dist.all_reduce(x, group=idle),
                "gloo": lambda x=x: dist.all_reduce(x, group=gloo),
            }
            counts = {}
            for name, call in calls.items():
                x.copy_(inputs[comm.rank])
                call()
                wrong = sum(comm._host.all_gather(int(((x.double() - exact).abs() > bound).sum())))
                if wrong and name != "torch":
                    raise ConfigError(f"{name} gave {wrong} wrong elements of {nbytes} bytes")
                x.zero_()  # else sums of sums would overflow
                each_us = max(comm._host.all_gather(float(np.median(microseconds(call, 30)))))
                counts[name] = max(10, min(20_000, int(seconds * 1e6 / each_us)))
            samples: dict[str, list[np.ndarray]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    comm.barrier()
                    samples[name].append(microseconds(call, counts[name]))
            for name, parts in samples.items():
                us = [max(comm._host.all_gather(float(np.median(part)))) for part in parts]
                all_us = max(comm._host.all_gather(float(np.median(np.concatenate(parts)))))
                row = {"world_size": comm.world_size, "dtype": dtype, "bytes": count * element.itemsize}
                found.append(row | {"implementation": name, "us": all_us, "us_of_rounds": us, "calls": counts[name]})
    dist.destroy_process_group()
    return found


def main() -> None:
    asked = options().parse_args()
    sizes = asked.sizes or [parse_size(one) for one in SIZES.split(",")]
    sources = asked.sources.resolve()
    built(sources)
    given = sources, sizes, asked.dtype, asked.rounds, asked.seconds
    found: list[dict[str, Any]] = []
    if dist.is_torchelastic_launched():
        found = rows(*given)
        if os.environ["RANK"] != "0":
            return
    else:
        for number in asked.world_size:
            found += shotcast.spawn(rows, number, *given, timeout_s=1800)[0]
    compared = "DeepSpeed / ours", "of rounds", "DeepSpeed / backend", "Gloo / ours"
    table = Table("ranks", "size", *(f"{name} us" for name in NAMES), *compared)
    for number in sorted({row["world_size"] for row in found}):
        for nbytes in sorted({row["bytes"] for row in found}):
            same = [row for row in found if (row["world_size"], row["bytes"]) == (number, nbytes)]
            us = {row["implementation"]: row["us"] for row in same}
            of_rounds = {row["implementation"]: row["us_of_rounds"] for row in same}
            ratios = [a / b for a, b in zip(of_rounds["deepspeed"], of_rounds["shotcast"], strict=True)]
            cells = [f"{us[name]:.2f}" for name in NAMES]
            by_backend = np.median([a / b for a, b in zip(of_rounds["deepspeed"], of_rounds["backend"], strict=True)])
            quarters = np.quantile(ratios, (0.25, 0.75))
            cells += [f"{np.median(ratios):.2f}", "-".join(f"{one:.2f}" for one in quarters), f"{by_backend:.2f}"]
            table.add_row(str(number), format_size(nbytes), *cells, f"{us['gloo'] / us['shotcast']:.1f}")
    Console(width=140).print(table)
    if asked.json:
        write(asked.json, found, kernels.of_collectives("cpu"))


if __name__ == "__main__":
    main()
