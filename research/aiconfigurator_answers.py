"""Ask AIConfigurator for the rows of the strong-scaling study, and keep its answers as JSON.

    python -m venv aiconfigurator && aiconfigurator/bin/pip install aiconfigurator==0.12.0
    aiconfigurator/bin/python research/aiconfigurator_answers.py --json benchmarks/data/external/aiconfigurator.json

It runs in an environment of its own, which has neither shotcast nor PyTorch, in a minute and without a GPU. Its answers
come from its tables of measured kernels of TensorRT-LLM, interpolated; nothing of them is ours.

A "batch" row is its static mode: so many sequences a stage, their prompts at once, then their tokens, without a
scheduler. A "search" row is the best of its own search over batches and sizes of prompt steps for one layout, without
bounds on latencies (``aiconfigurator cli exp``). "all_reduce" rows are those of its tables.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas
from aiconfigurator.cli.api import cli_estimate, cli_exp

BACKEND = "trtllm"
MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
}
GPUS = {"llama-3.1-405b": 8, "llama-3.1-70b": 1, "llama-3.1-8b": 1}
LENGTHS = ((128, 128), (128, 2048), (1000, 1000), (2048, 128), (2048, 2048))
PUBLISHED = tuple((model, gpus, *lengths) for model, gpus in GPUS.items() for lengths in LENGTHS)
"""The rows of TensorRT-LLM's overview: model, GPUs of one tensor-parallel engine, tokens in and out."""
LAYOUTS = ((8, 1), (4, 2), (2, 4), (1, 8))
STAGES = (1, 2, 4, 8)
NO_BOUND_MS = 1e9
DATA = Path(__file__).parents[1] / "benchmarks" / "data" / "h200"


def packaged() -> Path:
    """Return the folder of the systems and tables that came with it."""
    import aiconfigurator_core

    return Path(aiconfigurator_core.__file__).parent


def model_path(name: str, folder: Path) -> str:
    """Return the model as AIConfigurator names it; ``:40`` after it is the number of layers."""
    model, _, layers = name.partition(":")
    if not layers:
        return MODELS[model]
    file = packaged() / "model_configs" / f"{MODELS[model].replace('/', '--')}_config.json"
    own = folder / name.replace(":", "_")
    own.mkdir(exist_ok=True)
    (own / "config.json").write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": int(layers)}))
    return str(own)


def batch(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the static answer: so many sequences in each of the stages."""
    tensor, stages = map(int, question["layout"].split("x"))
    answer = cli_estimate(
        model_path(question["model"], folder),
        question["system"],
        mode="static",
        backend_name=BACKEND,
        isl=question["prompt"],
        osl=question["output"],
        batch_size=-(-question["sequences"] // stages),
        tp_size=tensor,
        pp_size=stages,
        gemm_quant_mode=question["gemm"],
        kvcache_quant_mode=question["kv"],
    )
    return {
        "ttft_ms": answer.ttft,
        "tpot_ms": answer.tpot,
        "request_ms": answer.request_latency,
        "tokens_per_s": answer.tokens_per_second,
        "memory_gib": answer.memory,
        "version": answer.backend_version,
    }


def search(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the answer of its search: the most tokens/s in a layout."""
    tensor, stages = map(int, question["layout"].split("x"))
    experiment = {
        "serving_mode": "agg",
        "model_path": model_path(question["model"], folder),
        "system_name": question["system"],
        "backend_name": BACKEND,
        "total_gpus": tensor * stages,
        "agg_num_gpu_candidates": [tensor * stages],
        "agg_tp_candidates": [tensor],
        "agg_pp_candidates": [stages],
        "isl": question["prompt"],
        "osl": question["output"],
        "ttft": NO_BOUND_MS,
        "tpot": NO_BOUND_MS,
        "gemm_quant_mode": question["gemm"],
        "kvcache_quant_mode": question["kv"],
    }
    found = cli_exp(config={"row": experiment}, top_n=1).best_configs["row"].to_dict("records")
    if not found:
        raise ValueError("no configuration found")
    best = found[0]
    return {
        "ttft_ms": best["ttft"],
        "tpot_ms": best["tpot"],
        "tokens_per_s": best["tokens/s"],
        "sequences": best["concurrency"],
        "memory_gib": best["memory"],
        "version": best["version"],
    }


def questions() -> Iterator[dict[str, Any]]:
    """Yield the rows of the study."""
    fp8 = {"system": "h200_sxm", "gemm": "fp8_static"}
    common = {"table": "layouts", "model": "llama-3.1-405b", "prompt": 2048, "output": 128, "kv": "fp8", **fp8}
    for tensor, stages in LAYOUTS:
        layout = f"{tensor}x{stages}"
        yield {**common, "mode": "batch", "layout": layout, "sequences": 1}
        yield {**common, "mode": "search", "layout": layout}
    for model, gpus, prompt, output in PUBLISHED:
        for kv in ("fp8", "bfloat16"):
            row = {"table": "tokens", "mode": "search", "model": model, "layout": f"{gpus}x1", "kv": kv, **fp8}
            yield {**row, "prompt": prompt, "output": output}
    for system, gemm in (("rtx_pro_6000_server", "nvfp4"), ("h200_sxm", "fp8_static")):
        for stages in STAGES:
            row = {"table": "stages", "mode": "search", "model": "llama-3.1-70b", "layout": f"1x{stages}"}
            yield {**row, "system": system, "gemm": gemm, "kv": "fp8", "prompt": 2048, "output": 128}
    for file in sorted(DATA.glob("engine*.json")):
        for run in json.loads(file.read_text())["rows"]:
            if run["algorithm"] == "auto" and run["model"].startswith("random:") and run["layout"] != "1x1":
                yield {
                    "table": "engine",
                    "mode": "batch",
                    "model": run["model"].removeprefix("random:"),
                    "layout": run["layout"],
                    "sequences": run["batch"],
                    "prompt": run["prompt"],
                    "output": run["output"],
                    "system": "h200_sxm",
                    "gemm": "fp8_static" if run["quantization"] else "bfloat16",
                    "kv": "bfloat16",
                }


def all_reduces() -> Iterator[dict[str, Any]]:
    """Yield the rows of its tables of all-reduces on H200, of 16-bit elements, as measured in graphs."""
    tables = {
        "TensorRT-LLM": ("trtllm/1.3.0rc20/custom_allreduce_perf.parquet", "allreduce_dtype", "TRTLLM"),
        "SGLang": ("sglang/0.5.14/custom_allreduce_perf.parquet", "allreduce_dtype", "SGLang_CustomAllReduce_graph"),
        "vLLM": ("vllm/0.24.0/custom_allreduce_perf.parquet", "allreduce_dtype", "vLLM_custom_graph"),
        "NCCL": ("nccl/2.29.2/nccl_perf.parquet", "nccl_dtype", "NCCL"),
    }
    for library, (path, dtype, source) in tables.items():
        table = pandas.read_parquet(packaged() / "systems" / "data" / "h200_sxm" / "comm" / path)
        rows = table[(table["op_name"] == "all_reduce") & (table["kernel_source"] == source)]
        for row in rows[rows[dtype].isin(("half", "bfloat16"))].to_dict("records"):
            yield {
                "library": library,
                "version": row["version"],
                "gpus": int(row["num_gpus"]),
                "elements": int(row["message_size"]),
                "time_us": round(1e3 * float(row["latency"]), 3),
            }


def rounded(value: Any) -> Any:
    """Return floats with six digits."""
    return float(f"{float(value):.6g}") if isinstance(value, float) else value


def answered(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a question with its answer, or with the error."""
    ask = batch if question["mode"] == "batch" else search
    try:
        answer = ask(question, folder)
    except Exception as error:  # whatever it says is the answer
        return {**question, "error": f"{type(error).__name__}: {error}"}
    return {**question, **{name: rounded(value) for name, value in answer.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        rows = [answered(question, Path(folder)) for question in questions()]
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["research/aiconfigurator_answers.py", *sys.argv[1:]]),
        "origin": "external: answers of AIConfigurator and rows of its tables, none of them measured by shotcast",
        "versions": {name: metadata.version(name) for name in ("aiconfigurator", "aiconfigurator-core")},
        "backend": BACKEND,
    }
    # a row a line, so that a difference can be read
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items()]
    for name, kept in (("rows", rows), ("all_reduce", list(all_reduces()))):
        lines.append(f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(row) for row in kept) + "\n]")
    options.json.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
