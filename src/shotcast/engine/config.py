"""The configuration of an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from shotcast.collectives.registry import import_named, registered
from shotcast.engine.speculative_config import SpeculativeConfig
from shotcast.errors import ConfigError, similar

if TYPE_CHECKING:
    from shotcast.models.config import ModelConfig

_CPU_DTYPES, _CUDA_DTYPES = ("float32", "bfloat16"), ("bfloat16", "float16", "float32")
DTYPES = {"auto": ("float32", "bfloat16", "float16"), "cpu": _CPU_DTYPES, "cuda": _CUDA_DTYPES}
QUANTIZATIONS = ("", "fp8")
MAX_RANKS = 1024
"""The largest number of ranks of an engine."""
_AUTO = re.compile(r"auto(?::([1-9]\d{0,3}))?")
MAX_SPECULATING = 64
"""The most sequences whose proposals are verified in one step, limited by the logits buffer."""
MAX_PROPOSALS = 512
"""The most proposals that a step verifies: with a vocabulary of 128,000, their logits take 250 MB."""
DEFAULT_TARGET = "throughput"
DEFAULT_MODEL_LEN = 8192
_KINDS = {"bool": (bool, "True or False"), "str": (str, "a string")}
"""The types of options that are checked by their annotation, and their words in errors."""
_DIVISION = ("tensor_parallel", "pipeline_parallel")


def parse_layout(text: str, others: str = "") -> tuple[int, int]:
    """Parse a layout ``TxP``, such as 4x1 or 2x2, into ranks per stage and stages.

    Args:
        others: other accepted values, for the error message.

    Raises:
        ConfigError: the text is not a layout.
    """
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if found is None:
        raise ConfigError(
            f"a layout must be {others}TxP (tensor by pipeline parallel) such as 4x1 or 2x2, not {text!r}"
        )
    return int(found[1]), int(found[2])


def parse_workload(text: str) -> tuple[int, int] | None:
    """Parse a workload such as 2048+128 into prompt and output tokens; None if the text is empty.

    Raises:
        ConfigError: the text is not a workload.
    """
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d{0,8})\+([1-9]\d{0,8})", text)
    if found is None:
        raise ConfigError(f"workload must be tokens of a prompt and of an output such as 2048+128, not {text!r}")
    return int(found[1]), int(found[2])


def algorithm_names() -> tuple[str, ...]:
    """Return the algorithms that an engine may use: ``auto``, and the lossless ones without multicast."""
    import_named()
    known = registered().items()
    return ("auto", *(name for name, algorithm in known if not algorithm.lossy and not algorithm.multicast))


OVERLAP = ("auto", "off")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's model, the ranks it is spread over, and limits.

    Args:
        model: a Hugging Face folder, ``org/name`` or ``org/name@revision`` of the Hugging Face Hub, a GGUF file,
            ``smollm2``, ``random:PRESET``, or ``random:PRESET:LAYERS`` for another number of layers.
        tensor_parallel: ranks that share each layer.
        pipeline_parallel: pipeline stages, each with some of the layers.
        layout: both of them as ``TxP``, such as 4x2; or ``auto``, which plans for the visible GPUs or the ranks of
            torchrun and selects the best layout for ``target``; ``auto:4`` plans for 4 ranks. "" means that
            ``tensor_parallel`` and ``pipeline_parallel`` apply.
        target: the goal of ``auto``: ``throughput``, ``latency``, or bounds in milliseconds such as
            ``ttft=500,tpot=20``.
        workload: tokens of a prompt and of an output that ``auto`` plans for, such as ``512+256``; "" means 2048+128,
            reduced if necessary to fit ``max_model_len``.
        device: ``cpu``, ``cuda``, or ``auto``: CUDA if every rank of this machine can have a GPU.
        dtype: the data type of weights and activations; "" means float32 on the CPU and bfloat16 on CUDA.
        quantization: quantization of the layers' matrices: ``fp8`` (e4m3, on CUDA with bfloat16), computed when the
            model is loaded; embeddings, head and norms keep their data type. "" means none.
        kv_cache_dtype: ``fp8`` keeps keys and values as e4m3 with a scale for each head of each token, on CUDA with
            16-bit data types; "" keeps them in the data type of activations (on the CPU, float32).
        max_model_len: maximum number of tokens of a sequence, prompt and output together; 0 means the model's maximum,
            at most 8192.
        max_num_seqs: maximum number of sequences computed together.
        max_num_batched_tokens: maximum number of tokens of a step; longer prompts are computed in chunks. On GPUs,
            without pipeline stages, a step of prompts alone may have twice as many: no sequence waits for its next
            token.
        block_size: tokens per block of the paged cache.
        kv_cache_bytes: bytes of keys and values on each rank; 0 means enough for all sequences at full length, within
            the limit of ``gpu_memory_utilization`` (on the CPU, a quarter of what ``memory_fraction`` leaves).
        gpu_memory_utilization: the fraction of a GPU's memory that its ranks may use for weights, steps and cache. The
            memory of steps is measured before the cache is allocated. On CUDA only.
        memory_fraction: the fraction of this machine's free memory that weights and caches of its CPU ranks may use.
        prefix_caching: keep the keys and values of finished requests while there is room, for prompts with the same
            prefix.
        overlap: compute the halves of long prompts in turn, so that one communicates while the other computes: ``auto``
            if a measurement at startup finds a gain, on GPUs and on CPU ranks of several nodes; or ``off``.
            Products with other numbers of rows may round differently.
        algorithm: the algorithm of the all-reduces, as in :meth:`Communicator.all_reduce`; ``ring`` is not fused with
            norms.
        timeout_s: how long a rank waits for another in a collective; a stage waits ten times as long for another.
        speculative_config: speculative decoding, as options in a mapping or in JSON, such as ``{"method": "ngram",
            "num_speculative_tokens": 4}``; see :class:`SpeculativeConfig`. None for none. It does not change outputs,
            and is used only if measurements show a gain.
        seed: the seed for requests without one; None samples differently each time.
        generation_config: the source of default sampling parameters: ``auto`` for ``generation_config.json`` of the
            model, a folder that contains such a file, or ``none``.
        progress: show a progress bar while the model is read.
        stamp_every: on CUDA, measure the time and the communication time of one step in this many, if all its sequences
            decode; such a step takes slightly longer. 0 measures none, and the statistics omit these times.
    """

    model: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    layout: str = ""
    target: str = DEFAULT_TARGET
    workload: str = ""
    device: str = "auto"
    dtype: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    memory_fraction: float = 0.85
    prefix_caching: bool = True
    overlap: str = "auto"
    algorithm: str = "auto"
    timeout_s: float = 60.0
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None
    seed: int | None = None
    generation_config: str = "auto"
    progress: bool = False
    stamp_every: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name or a path, not {self.model!r}")
        for name, low, high in (
            ("tensor_parallel", 1, MAX_RANKS),
            ("pipeline_parallel", 1, MAX_RANKS),
            ("max_model_len", 0, 2**31 - 1),
            ("max_num_seqs", 1, 2**16),
            ("max_num_batched_tokens", 1, 2**20),
            ("block_size", 1, 2**10),
            ("kv_cache_bytes", 0, 2**63 - 1),
            ("stamp_every", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
        for field in fields(self):
            kind, words = _KINDS.get(str(field.type), (object, ""))
            if not isinstance(value := getattr(self, field.name), kind):
                raise ConfigError(f"{field.name} must be {words}, not {value!r}")
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.read(self.speculative_config))
        self._divide()
        if self.ranks > MAX_RANKS:
            raise ConfigError(f"tensor_parallel x pipeline_parallel is {self.ranks}, above {MAX_RANKS} ranks")
        if self.device not in DTYPES:
            raise ConfigError(f"device must be one of {', '.join(DTYPES)}, not {self.device!r}")
        if self.dtype and self.dtype not in DTYPES[self.device]:
            where = "" if self.device == "auto" else f" on {self.device}"
            raise ConfigError(f"dtype{where} must be one of {', '.join(DTYPES[self.device])}, not {self.dtype!r}")
        for name, without, types, dtypes in (
            ("quantization", "none", "bfloat16", ("", "bfloat16")),
            ("kv_cache_dtype", "that of activations", "16-bit types", ("", "bfloat16", "float16")),
        ):
            value = getattr(self, name)
            if value not in QUANTIZATIONS:
                raise ConfigError(f'{name} must be "" ({without}) or fp8, not {value!r}')
            if value and (self.device == "cpu" or self.dtype not in dtypes):
                dtype = f" with {self.dtype}" if self.dtype else ""
                raise ConfigError(f"{name} {value} works on CUDA with {types}, not on {self.device}{dtype}")
        if self.overlap not in OVERLAP:
            raise ConfigError(f"overlap must be one of {', '.join(OVERLAP)}, not {self.overlap!r}")
        known = algorithm_names()
        if self.algorithm not in known:
            raise ConfigError(f"algorithm must be one of {', '.join(known)}, not {self.algorithm!r}")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len must be 0 (the length that the model was made for) or at least 2, not 1")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise ConfigError(f"seed must be None or a whole number from 0 to 2^63 - 1, not {self.seed!r}")
        for name in ("gpu_memory_utilization", "memory_fraction"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= 1:
                raise ConfigError(f"{name} must be a number above 0, at most 1, not {value!r}")
        if type(self.timeout_s) not in (int, float) or not 0 < self.timeout_s < 1e9:
            raise ConfigError(f"timeout_s must be a number of seconds above 0, not {self.timeout_s!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or not all sequences could get a token in each step"
            )

    def _divide(self) -> None:
        """Divide the ranks by ``layout``. Raises ConfigError if it is invalid or given twice."""
        given = divided = self.tensor_parallel, self.pipeline_parallel
        if self.layout:
            divided = (1, 1) if self.plans_layout else parse_layout(self.layout, "auto, auto:N for N ranks, or ")
        if given not in ((1, 1), divided):
            raise _two_layouts(self.layout, *given)
        for name, value in zip(_DIVISION, divided, strict=True):
            object.__setattr__(self, name, value)
        if self.plans_layout:
            parse_workload(self.workload)
            return
        for name, default in (("target", DEFAULT_TARGET), ("workload", "")):
            if getattr(self, name) != default:
                raise ConfigError(f"{name} is what layout auto plans for; leave it out where the layout is given")

    @classmethod
    def from_options(cls, model: str | PathLike[str], **options: Any) -> EngineConfig:
        """Create a configuration whose model may be a path object.

        Raises:
            ConfigError: an option cannot be used, or ``layout`` is given with ``tensor_parallel`` or
                ``pipeline_parallel``.
        """
        for name in options.keys() - (known := {field.name for field in fields(cls)} - {"model"}):
            hint = similar("did you mean {}?", name, known) or f"accepted: {', '.join(sorted(known))}"
            raise ConfigError(f"the engine has no option {name!r}; {hint}")
        if options.get("layout") and any(name in options for name in _DIVISION):
            raise _two_layouts(options["layout"], *(options.get(name, 1) for name in _DIVISION))
        return cls(fspath(model) if isinstance(model, PathLike) else model, **options)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The speculative decoding options; None if disabled."""
        assert self.speculative_config is None or isinstance(self.speculative_config, SpeculativeConfig)
        return self.speculative_config

    @property
    def max_proposals(self) -> int:
        """The most proposals that a step verifies."""
        found = self.speculation
        count = found.num_speculative_tokens * min(self.max_num_seqs, MAX_SPECULATING) if found else 0
        return min(count, MAX_PROPOSALS)

    @property
    def plans_layout(self) -> bool:
        """True if a plan has yet to choose the layout."""
        return _AUTO.fullmatch(self.layout) is not None

    @property
    def asked_ranks(self) -> int | None:
        """The number of ranks in ``auto:N`` or in an explicit layout; None for ``auto``."""
        found = _AUTO.fullmatch(self.layout)
        if found is None:
            return self.ranks
        return int(found[1]) if found[1] else None

    def divided(self, layout: str) -> EngineConfig:
        """Return this configuration with a layout chosen by a plan, such as 4x2."""
        return replace(self, layout=layout, target=DEFAULT_TARGET, workload="")

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of any step, on the selected device.

        Stages of a pipeline work on different steps of a prompt, so larger steps would leave them idle for longer.
        """
        return self.max_num_batched_tokens * (2 if self.device == "cuda" and self.pipeline_parallel == 1 else 1)

    @property
    def dtype_name(self) -> str:
        """The data type of weights and activations on the selected device."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def ranks(self) -> int:
        """The number of ranks of all stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def output_rank(self) -> int:
        """The rank that sends sampled tokens to rank 0: the first of the last stage."""
        return self.ranks - self.tensor_parallel


def max_model_len_of(config: EngineConfig, model: ModelConfig) -> int:
    """Return the maximum number of tokens of a sequence.

    Raises:
        ConfigError: the model supports fewer tokens.
    """
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model was made for at most {model.max_position} tokens"
        )
    return config.max_model_len or min(model.max_position, DEFAULT_MODEL_LEN)


def _two_layouts(layout: object, tensor_parallel: object, pipeline_parallel: object) -> ConfigError:
    return ConfigError(
        f"layout {layout} and tensor_parallel x pipeline_parallel ({tensor_parallel} x {pipeline_parallel}) both say "
        "how the ranks are divided; give one of them"
    )
