"""Time a prompt and the tokens after it by llama.cpp, on the cores of this machine.

    python research/time_llama_cpp.py MODEL.gguf --json benchmarks/data/cpu/llama_cpp.json

It needs ``pip install llama-cpp-python``. The tokens are random, as those of ``shotcast bench engine`` are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import time
from pathlib import Path

import llama_cpp

from shotcast.hardware.detect import detect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--output", type=int, default=24)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(
        str(args.model),
        n_ctx=args.prompt + args.output + 1,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    numbers = random.Random(0)
    prompt = [numbers.randrange(model.n_vocab()) for _ in range(args.prompt)]
    rows = []
    for _ in range(3):  # the first warms up
        model.reset()
        times = [time.perf_counter()]
        model.eval(prompt)
        times.append(time.perf_counter())
        for _ in range(args.output - 1):
            model.eval([model.sample(temp=0)])
        times.append(time.perf_counter())
        first, others = times[1] - times[0], times[2] - times[1]
        rows.append({"ttft_ms": 1e3 * first, "tpot_ms": 1e3 * others / (args.output - 1)})
        print(rows[-1], flush=True)
    if args.json is not None:
        result = {
            "hardware": str(detect()),
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv[:1], args.model.name, *sys.argv[2:]]),
            "version": llama_cpp.__version__,
            "threads": threads,
            "prompt": args.prompt,
            "output": args.output,
            "rounds": rows[1:],
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
