"""Ask AIConfigurator for models with experts, and keep its answers and rows of its tables as JSON.

    aiconfigurator/bin/python research/aiconfigurator_experts.py --json benchmarks/data/external/experts.json

The environment is that of ``research/aiconfigurator_answers.py``, which says what a "batch" and a "search" are.
"grouped" rows are those of its tables of grouped products, with what is around them but the router, for vLLM and SGLang
on the H200: microseconds by tokens, with as many tokens for each expert ("balanced") or a few favourites ("power law").
"latent" rows are those of the attention of a layer of DeepSeek-V3, with its products: one token of each sequence after
a context, or a prompt.
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
from aiconfigurator_answers import BACKEND, NO_BOUND_MS, packaged, rounded

MODELS = {
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
SHAPES = {
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "mixtral-8x22b": (6144, 16384, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
}
"""Width of the residual, width of an expert, experts, and experts a token."""
PUBLISHED = ((128, 128), (128, 2048), (1000, 1000), (2048, 128), (2048, 2048))
SHARINGS = ((1, 1), (4, 1), (8, 1), (1, 8))
"""Ranks that share each expert, and groups of ranks with different experts."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LATENT, HEADS, BATCHES = "trtllm/1.3.0rc20", (128, 32, 16), (1, 16, 128, 512)
CONTEXTS = (128, 1024, 4096, 16384)
TABLES = {
    ("vllm/0.24.0", "bfloat16", "vllm_unquantizedfusedmoe_triton_tritonexperts"): "vLLM",
    ("vllm/0.24.0", "fp8_block", "vllm_fp8moe_triton_tritonexperts"): "vLLM",
    ("sglang/0.5.14", "bfloat16", "sglang_fused_moe_triton"): "SGLang",
    ("sglang/0.5.14", "fp8_block", "sglang_fused_moe_triton"): "SGLang",
}


def questions() -> Iterator[dict[str, Any]]:
    """Yield what is asked: steps by sequences, and the most tokens/s."""
    common = {"system": "h200_sxm", "prompt": 1024, "output": 128}
    for model, tensor, groups, dp in (
        ("mixtral-8x7b", 2, 1, 1),
        ("mixtral-8x7b", 4, 1, 1),
        ("mixtral-8x7b", 4, 4, 1),
        ("qwen3-30b-a3b", 1, 1, 1),
        ("qwen3-30b-a3b", 4, 1, 1),
        ("qwen3-235b-a22b", 8, 1, 1),
        ("qwen3-235b-a22b", 8, 8, 1),
        ("qwen3-235b-a22b", 8, 8, 8),
    ):
        for sequences in (1, 16, 64, 256):
            if sequences >= dp:
                row = {"model": model, "tensor": tensor, "groups": groups, "dp": dp, "sequences": sequences}
                yield {"table": "steps", "mode": "batch", "dtype": "bfloat16", **common, **row}
    for prompt, output in PUBLISHED:
        for dp in (1, 8):
            row = {"model": "qwen3-235b-a22b", "tensor": 8, "groups": 8, "dp": dp}
            row |= {"prompt": prompt, "output": output, "system": "h200_sxm", "dtype": "fp8_block"}
            yield {"table": "tokens", "mode": "search", **row}
    row = {"model": "deepseek-v3", "tensor": 8, "groups": 8, "dp": 8, "prompt": 1024, "output": 2048}
    yield {"table": "deepseek", "mode": "batch", "sequences": 1024, "system": "h200_sxm", "dtype": "fp8_block", **row}


def model_path(name: str, folder: Path) -> str:
    """Return a folder with the packaged configuration of a model, as not all are among those that have names."""
    own = folder / name
    own.mkdir(exist_ok=True)
    file = packaged() / "model_configs" / f"{MODELS[name].replace('/', '--')}_config.json"
    (own / "config.json").write_text(file.read_text())
    return str(own)


def batch(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the static answer: so many sequences at once."""
    dp, groups = question["dp"], question["groups"]
    answer = cli_estimate(
        model_path(question["model"], folder),
        question["system"],
        mode="static",
        backend_name=BACKEND,
        isl=question["prompt"],
        osl=question["output"],
        batch_size=question["sequences"] // dp,
        tp_size=question["tensor"] // dp,
        attention_dp_size=dp,
        moe_tp_size=question["tensor"] // groups,
        moe_ep_size=groups,
        gemm_quant_mode=question["dtype"],
        moe_quant_mode=question["dtype"],
        kvcache_quant_mode="bfloat16",
    )
    return {"ttft_ms": answer.ttft, "tpot_ms": answer.tpot, "version": answer.backend_version}


def latent() -> Iterator[dict[str, Any]]:
    """Yield rows of its tables of the attention of a layer of DeepSeek-V3, in bfloat16."""
    folder = packaged() / "systems" / "data" / "h200_sxm" / "mla" / LATENT
    for phase in ("generation", "context"):
        table = pandas.read_parquet(folder / f"mla_{phase}_module_perf.parquet")
        table = table[(table["kv_cache_dtype"] == "bfloat16") & (table["gemm_type"] == "bfloat16")]
        for row in table.to_dict("records"):
            if row["num_heads"] in HEADS and row["batch_size"] in BATCHES:
                context, tokens = int(row["step"]), int(row["isl"])
                if (context in CONTEXTS) if phase == "generation" else (tokens in CONTEXTS and row["batch_size"] == 1):
                    yield {
                        "framework": f"TensorRT-LLM {row['version']}",
                        "heads": int(row["num_heads"]),
                        "sequences": int(row["batch_size"]),
                        "tokens": tokens,
                        "context": context if phase == "generation" else 0,
                        "us": rounded(1e3 * float(row["latency"])),
                    }


def search(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the answer of its search: the most tokens/s in a layout."""
    dp, groups, tensor = question["dp"], question["groups"], question["tensor"]
    experiment = {
        "serving_mode": "agg",
        "model_path": model_path(question["model"], folder),
        "system_name": question["system"],
        "backend_name": BACKEND,
        "total_gpus": tensor,
        "agg_num_gpu_candidates": [tensor],
        "agg_tp_candidates": [tensor // dp],
        "agg_pp_candidates": [1],
        "agg_dp_candidates": [dp],
        "agg_moe_tp_candidates": [tensor // groups],
        "agg_moe_ep_candidates": [groups],
        "isl": question["prompt"],
        "osl": question["output"],
        "ttft": NO_BOUND_MS,
        "tpot": NO_BOUND_MS,
        "gemm_quant_mode": question["dtype"],
        "moe_quant_mode": question["dtype"],
        "kvcache_quant_mode": "fp8",
    }
    found = cli_exp(config={"row": experiment}, top_n=1).best_configs["row"].to_dict("records")
    if not found:
        raise ValueError("no configuration found")
    best = found[0]
    return {"tokens_per_s": best["tokens/s"], "sequences": best["concurrency"], "version": best["version"]}


def answered(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a question with its answer, or with the error."""
    try:
        answer = batch(question, folder) if question["mode"] == "batch" else search(question, folder)
    except Exception as error:  # whatever it says is the answer
        return {**question, "error": f"{type(error).__name__}: {error}"[:200]}
    return {**question, **{name: rounded(value) for name, value in answer.items()}}


def grouped() -> Iterator[dict[str, Any]]:
    """Yield the rows of its tables of grouped products, a model and a sharing each."""
    for (path, dtype, source), framework in TABLES.items():
        file = packaged() / "systems" / "data" / "h200_sxm" / "moe" / path / "moe_perf.parquet"
        table = pandas.read_parquet(file)
        table = table[(table["moe_dtype"] == dtype) & (table["kernel_source"] == source)]
        for model, (hidden, width, experts, chosen) in SHAPES.items():
            shape = (table["hidden_size"] == hidden) & (table["inter_size"] == width)
            of_model = table[shape & (table["num_experts"] == experts) & (table["topk"] == chosen)]
            for sharing, groups in SHARINGS:
                of_sharing = of_model[(of_model["moe_tp_size"] == sharing) & (of_model["moe_ep_size"] == groups)]
                for distribution in ("balanced", "power_law_1.01"):
                    rows = of_sharing[of_sharing["distribution"] == distribution].set_index("num_tokens")["latency"]
                    times = {str(tokens): rounded(1e3 * rows[tokens]) for tokens in TOKENS if tokens in rows}
                    if times:
                        yield {
                            "framework": f"{framework} {path.partition('/')[2]}",
                            "dtype": dtype,
                            "model": model,
                            "sharing": sharing,
                            "groups": groups,
                            "distribution": distribution,
                            "us": times,
                        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["research/aiconfigurator_experts.py", *sys.argv[1:]]),
        "origin": "external: answers of AIConfigurator and rows of its tables, none of them measured by shotcast",
        "versions": {name: metadata.version(name) for name in ("aiconfigurator", "aiconfigurator-core")},
        "backend": BACKEND,
    }
    # a row a line, so that a difference can be read
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items()]
    with tempfile.TemporaryDirectory() as folder:
        rows = [answered(each, Path(folder)) for each in questions()]
    for name, kept in (("rows", rows), ("grouped", list(grouped())), ("latent", list(latent()))):
        lines.append(f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(row) for row in kept) + "\n]")
    options.json.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
