"""Options of commands that run an engine."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from shotcast.cli.options import Device, DeviceOption, dtypes_named, with_underscores
from shotcast.launcher import rank_server

Model = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face folder, or org/name[@revision] of its Hub, a GGUF file, smollm2, random:PRESET[:LAYERS]."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "-d", "--dtype", callback=dtypes_named, help="Default: float32 on the CPU, bfloat16 on CUDA. Also bf16, half."
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        "--generation-config",
        help="Where sampling defaults come from: auto (generation_config.json of the model), a folder with one, none.",
    ),
]


def engine(
    tensor_parallel: Annotated[
        int | None, typer.Option("-t", "--tensor-parallel", help="Ranks that each layer is divided among. Default: 1.")
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option("-p", "--pipeline-parallel", help="Pipeline stages that the layers are divided into. Default: 1."),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="Both as TxP, such as 4x2; or auto, which plans for all GPUs (auto:4 for 4 ranks) and takes the best."
        ),
    ] = "",
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    quantization: Annotated[str, typer.Option(help="fp8 stores the weights of the layers as e4m3; CUDA only.")] = "",
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8 keeps keys and values as e4m3; CUDA only.")] = "",
    max_model_len: Annotated[
        int, typer.Option(help="Tokens of prompt and output together. Default: the model's limit, at most 8192.")
    ] = 0,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="CUDA: the part of a GPU's memory for weights, steps and KV cache together.")
    ] = 0.9,
    speculative_config: Annotated[
        str,
        typer.Option(help='Speculative decoding, in JSON such as {"method": "ngram", "num_speculative_tokens": 4}.'),
    ] = "",
) -> dict[str, Any]:
    """Return the engine options that were given, and the defaults of the others."""
    given = {name: value for name, value in locals().items() if value not in (None, "")}
    return given | {"device": device.value, "progress": sys.stderr.isatty()}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import the modules that run an engine, without garbage collection; the rank server imports them too."""
    rank_server.start_for_engine()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def sums(
    algorithm: Annotated[
        str, typer.Option(callback=with_underscores, help="The algorithm of the all-reduces: auto, or a name.")
    ] = "auto",
    overlap: Annotated[
        str,
        typer.Option(help="Communicate under the other half of long prompts: auto or off."),
    ] = "auto",
) -> dict[str, Any]:
    """Return the options for an engine's sums between ranks."""
    return locals()


def sampling(
    max_tokens: Annotated[
        int | None, typer.Option("-n", "--max-tokens", help="The most tokens that the answer may have.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens whose probabilities add up to this.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens; 0 for all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens at least this likely relative to the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed, which makes sampling repeatable.")] = None,
) -> dict[str, Any]:
    """Return the sampling options that were given."""
    return {name: value for name, value in locals().items() if value is not None}


def say(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, style="dim", markup=False, highlight=False)
