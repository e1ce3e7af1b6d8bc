"""Time ``generate`` of Hugging Face Transformers on the points of a result of ``shotcast bench engine``.

    shotcast bench engine --layouts 1x1,2x1 --batches 1,4 --json result.json
    python research/time_transformers.py result.json [--rounds 3]

Model, device, dtype, batches and lengths are those of the result; weights and the number of threads are the same, too.
The rows are put before those of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import engine_results
import torch

from shotcast.bench.engine_bench import EngineBenchConfig, read_bandwidth_gbps, row_of
from shotcast.bench.engine_report import TRANSFORMERS, EngineRow
from shotcast.launcher.spawn import spawn
from shotcast.models.source import find_model, open_checkpoint
from shotcast.planner.step import Layout


def config_of(rows: Sequence[EngineRow], rounds: int) -> EngineBenchConfig:
    """Return the points of a result's rows."""
    first, batches = rows[0], tuple(dict.fromkeys(row.batch for row in rows))
    lengths = first.prompt, first.output
    return EngineBenchConfig(first.model, (), batches, (), *lengths, rounds, first.device, first.dtype)


def measured(config: EngineBenchConfig) -> list[EngineRow]:
    """Return a row for each batch."""
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    path = find_model(config.model)
    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    dtype = getattr(torch, config.dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **options)
    loaded = loaded.eval().to(config.device)
    bandwidth = read_bandwidth_gbps(config.device)
    with contextlib.closing(open_checkpoint(config.model)) as checkpoint:
        model = replace(checkpoint.config, stored_bytes=None)  # it keeps every matrix in the dtype
    rows = []
    for batch in config.batches:
        numbers = torch.Generator().manual_seed(batch)

        def token_times(length: int, batch: int = batch, numbers: torch.Generator = numbers) -> list[float]:
            """Return the seconds until each token arrives."""
            prompts = torch.randint(model.vocab, (batch, config.prompt), generator=numbers).to(config.device)
            times: list[float] = []

            def record_time(tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
                times.append(time.perf_counter() - started)
                return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

            started = time.perf_counter()
            loaded.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([record_time]),
            )
            return times

        token_times(2)
        runs = [token_times(config.output) for _ in range(config.rounds)]
        times = {
            "ttft_ms": median(run[0] for run in runs) * 1e3,
            "tpot_ms": median((run[-1] - run[0]) / (config.output - 1) for run in runs) * 1e3,
            "itl_ms": median(after - before for run in runs for before, after in itertools.pairwise(run)) * 1e3,
            "tokens_per_s": median(batch * config.output / run[-1] for run in runs),
        }
        point = Layout(1, 1), TRANSFORMERS, batch, config.dtype, bandwidth
        rows.append(row_of(config, model, *point, communication=0.0, **times))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = [row for row in engine_results.read(options.result) if row.algorithm != TRANSFORMERS]
    # on a rank, whose threads and memory are an engine's
    (added,) = spawn(measured, 1, config_of(rows, options.rounds))
    document = json.loads(options.result.read_text())
    again = shlex.join(["python", "research/time_transformers.py", *(sys.argv[1:] if arguments is None else arguments)])
    document["command"] += f" && {again}"
    document["rows"] = [asdict(row) for row in (*added, *rows)]
    options.result.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
