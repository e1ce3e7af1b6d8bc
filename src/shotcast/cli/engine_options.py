"""Options of the commands that run an engine."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from shotcast.cli.options import Device, dtypes_named, with_underscores

Model = Annotated[
    str,
    typer.Option(
        "-m", "--model", help="A Hugging Face folder, a GGUF file, smollm2, random:PRESET or random:PRESET:LAYERS."
    ),
]
TensorParallel = Annotated[int, typer.Option("-t", "--tensor-parallel", help="Ranks that each layer is divided among.")]
PipelineParallel = Annotated[
    int, typer.Option("-p", "--pipeline-parallel", help="Pipeline stages that the layers are divided into.")
]
Dtype = Annotated[
    str,
    typer.Option(
        "-d", "--dtype", callback=dtypes_named, help="Default: float32 on the CPU, bfloat16 on CUDA. Also bf16, half."
    ),
]
Quantization = Annotated[
    str, typer.Option("--quantization", help="fp8 stores the weights of the layers as e4m3; CUDA only.")
]
MaxModelLen = Annotated[
    int,
    typer.Option(
        "--max-model-len", help="Tokens of prompt and output together. Default: the model's limit, at most 8192."
    ),
]
MaxSequences = Annotated[int, typer.Option("--max-sequences", help="Sequences in one batch.")]
MaxBatchTokens = Annotated[int, typer.Option("--max-batch-tokens", help="Tokens in one step.")]
KvCache = Annotated[
    str,
    typer.Option("--kv-cache", help="Bytes of the KV cache on each rank, such as 512M. Default: what memory allows."),
]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(
        "--gpu-memory-utilization", help="CUDA: the part of a GPU's memory for weights, steps and KV cache together."
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        "--generation-config",
        help="Where sampling defaults come from: auto (generation_config.json of the model), a folder with one, none.",
    ),
]
Algorithm = Annotated[
    str,
    typer.Option("--algorithm", callback=with_underscores, help="The algorithm of the all-reduces: auto, or a name."),
]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="Divide the residual of long steps among the ranks.")
]
Overlap = Annotated[
    str,
    typer.Option(
        "--overlap", help="Communicate under the other half of long prompts: auto, on, plain, shaped (on GPUs) or off."
    ),
]
StampEvery = Annotated[
    int, typer.Option("--stamp-every", min=0, help="CUDA: time one step in this many for /metrics; 0 times none.")
]
RankTimeout = Annotated[float, typer.Option("--rank-timeout", help="Seconds that a rank waits for another.")]
MaxTokens = Annotated[int | None, typer.Option("-n", "--max-tokens", help="The most tokens that the answer may have.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 always takes the likeliest token.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Sample from the likeliest tokens whose probabilities add up to this.")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Sample from this many of the likeliest tokens; 0 for all.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Sample from tokens at least this likely relative to the likeliest.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="The seed, which makes sampling repeatable.")]


def engine_options(
    model: str,
    device: Device,
    tensor_parallel: int,
    pipeline_parallel: int,
    dtype: str,
    quantization: str,
    max_model_len: int,
    **others: Any,
) -> dict[str, Any]:
    return {
        "model": model,
        "device": device.value,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "dtype": dtype,
        "quantization": quantization,
        "max_model_len": max_model_len,
        "progress": sys.stderr.isatty(),
        **others,
    }


def say(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, style="dim", markup=False, highlight=False)
