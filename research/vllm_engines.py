"""vLLM's engine as it is, with our plug-in and in batch-invariant mode on two GPUs, in turns: ms a token, and faults.

    python research/vllm_engines.py --json benchmarks/data/h200/vllm_x2.json

vLLM must be importable, and so must the entry points of this package. All engines start at once, share the GPUs and
take their steps one after the other, so that no other load and no other clock falls on one of them. The model has the
shape of Llama 3.1 8B and weights of 0.02 times a normal distribution. A time is that of 129 tokens less that of one,
over 128. Then each engine answers one request among others, ten times, and its log-probabilities are compared byte for
byte. At last ``--fault`` befalls rank 1 under load, and the error that vLLM raises is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from gpu_timing import write

from shotcast.bench import kernels

FORMS = {
    "vLLM": {},
    "plug-in": {"SHOTCAST_VLLM": "1"},
    "invariant": {"VLLM_BATCH_INVARIANT": "1"},
    "both": {"SHOTCAST_VLLM": "1", "VLLM_BATCH_INVARIANT": "1"},
}
PLAIN = {
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to set the weights
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
BATCHES = (1, 8, 64, 256)
OTHERS = (0, 1, 3, 7, 12, 20, 40, 63, 100, 180)
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
KEYS_AND_VALUES = 4 << 30
FAULT_AFTER_S = 1.0
Step = Callable[[dict[str, Any]], dict[str, Any]]


def set_weights(worker: Any) -> None:
    """Give a worker's matrices random weights, of which each rank has its own."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(worker.rank)
    for parameter in worker.get_model().parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02, generator=generator)
    torch.cuda.synchronize()


class Engine:
    """vLLM's engine in this process, and the steps that the parent asks for."""

    def __init__(self, folder: str):
        from vllm import LLM

        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        self._llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=2,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=max(BATCHES),
            gpu_memory_utilization=0.18,  # a share of what is free; keys and values have a number of their own
            kv_cache_memory_bytes=KEYS_AND_VALUES,
            enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": list(BATCHES)},
            kernel_config={"enable_flashinfer_autotune": False},
        )
        self._llm.collective_rpc(set_weights)

    def _answers(self, prompts: list[list[int]], tokens: int, **options: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False, **options)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [answer.outputs[0] for answer in self._llm.generate(asked, params, use_tqdm=False)]

    def times(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the ms a token of a batch, and its first tokens."""
        prompts = [prompt_of(number, 32) for number in range(asked["batch"])]
        self._answers(prompts, 4)
        start = time.perf_counter()
        self._answers(prompts, 1)
        first = time.perf_counter()
        answers = self._answers(prompts, 129)
        ms = (time.perf_counter() - first - (first - start)) / 128 * 1e3
        return {"ms": round(ms, 4), "tokens": list(answers[0].token_ids[:12])}

    def likelihoods(self, _: dict[str, Any]) -> dict[str, Any]:
        """Return a digest of one request's tokens and log-probabilities among each number of others."""
        found = []
        for place, count in enumerate(OTHERS):
            others = [prompt_of(100 + 37 * place + i, 16 + (13 * i + 7 * place) % 200) for i in range(count)]
            half = count // 2
            answer = self._answers([*others[:half], prompt_of(5, 77), *others[half:]], 40, logprobs=3)[half]
            rows = [sorted((token, one.logprob) for token, one in row.items()) for row in answer.logprobs]
            found.append(sha256(repr((list(answer.token_ids), rows)).encode()).hexdigest()[:12])
        return {"digests": found}

    def fault(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the error of 64 long requests during which rank 1 is killed or stopped, and when it came."""
        import psutil

        children = psutil.Process().children(recursive=True)
        (victim,) = (one for one in children if "Worker_TP1" in " ".join([one.name(), *one.cmdline()]))
        began: list[float] = []

        def hit() -> None:
            began.append(time.monotonic())
            victim.send_signal(asked["signal"])

        threading.Timer(FAULT_AFTER_S, hit).start()
        try:
            self._answers([prompt_of(number, 32) for number in range(64)], 900)
        except Exception as error:
            return {"after_s": round(time.monotonic() - began[0], 2), "error": f"{type(error).__name__}: {error}"}
        return {"error": "none"}


def prompt_of(number: int, tokens: int) -> list[int]:
    """Return a prompt that no other number has."""
    return [(7919 * number + 31 * place) % 120000 + 100 for place in range(tokens)]


def serve(answers: TextIO) -> None:
    """Make the steps that the lines of stdin ask for; answer each with a line of JSON, after one of the start."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(folder)
        print(json.dumps({"ready_s": round(time.monotonic() - start, 1)}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(getattr(engine, asked.pop("step"))(asked)), file=answers, flush=True)


class Child:
    """A process with an engine.

    Args:
        command: of the process, which gets the number of the file that takes its answers.
        more: environment variables.
        log: takes what the process prints.
    """

    def __init__(self, command: list[str], more: dict[str, str], log: Path):
        reading, writing = os.pipe()
        with log.open("w") as printed:
            self._process = subprocess.Popen(
                [*command, str(writing)],
                env=os.environ | more,
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                text=True,
                start_new_session=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def answer(self) -> dict[str, Any] | None:
        """Wait for the next answer; None once the process has ended."""
        line = self._answers.readline()
        return json.loads(line) if line else None

    def step(self, name: str, **asked: Any) -> dict[str, Any] | None:
        """Let the engine make a step, and return what it answers; None once the process has ended."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"step": name, **asked}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return None
        return self.answer()

    def end(self) -> None:
        """Kill the process and those that it has started, also stopped ones, which outlive it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()


def in_turns(children: dict[str, Child], rounds: int, fault: int, found: dict[str, dict[str, Any]]) -> None:
    """Let engines take their steps in turns. Adds to ``found`` what each answers; an engine that ends has no more."""
    found |= {name: {} for name in children}

    def each(step: str, **asked: Any) -> dict[str, dict[str, Any]]:
        answers = {name: child.step(step, **asked) for name, child in children.items()}
        return {name: answer for name, answer in answers.items() if answer is not None}

    for name, child in children.items():
        found[name] |= child.answer() or {"failed": True}
    for batch in BATCHES:
        for _ in range(rounds):
            for name, answer in each("times", batch=batch).items():
                found[name].setdefault("ms", {}).setdefault(str(batch), []).append(answer["ms"])
                found[name].setdefault("tokens", {})[str(batch)] = answer["tokens"]
    for name, answer in each("likelihoods").items():
        found[name]["likelihoods"] = answer["digests"]
    for name, child in children.items() if fault else ():
        if (answer := child.step("fault", signal=fault)) is not None:
            found[name]["fault"] = answer
        child.end()  # kernels of its ranks may still wait


def lines_of(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return results as text: medians and ratios to the first form's, and how many log-probabilities differ."""
    text = []
    base = next(iter(found.values())).get("ms", {})
    for name, one in found.items():
        times = {batch: median(values) for batch, values in one.get("ms", {}).items()}
        shown = [f"{batch}: {ms:.3f} ({ms / median(base[batch]):.3f})" for batch, ms in times.items() if batch in base]
        text.append(f"{name}: ms a token by sequences {', '.join(shown) or 'none'}")
        if "likelihoods" in one:
            text.append(f"  {len(set(one['likelihoods']))} different log-probabilities in {len(OTHERS)} batches")
        if "fault" in one:
            text.append(f"  {one['fault']}")
    return text


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(FORMS), help="those to run; the first is what others are beside")
    parser.add_argument("--rounds", type=int, default=5, help="of every batch")
    parser.add_argument("--fault", choices=["none", "kill", "stop"], default="none", help="of rank 1, at the end")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.gettempdir()), help="a folder for what engines print"
    )
    parser.add_argument("--json", type=Path, help="a file for results")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    asked = options().parse_args()
    if asked.serve is not None:
        with os.fdopen(asked.serve, "w") as answers:
            serve(answers)
        return
    command = [sys.executable, __file__, "--serve"]
    children: dict[str, Child] = {}
    found: dict[str, dict[str, Any]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # engines end too, and results are kept
    try:
        for name in asked.forms.split(","):
            cache = {"VLLM_CACHE_ROOT": tempfile.mkdtemp(), "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
            children[name] = Child(command, PLAIN | cache | FORMS[name], asked.logs / f"vllm_{name}.log")
        fault = {"none": 0, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}[asked.fault]
        in_turns(children, asked.rounds, fault, found)
    finally:
        for child in children.values():
            child.end()
        if found:
            print("\n".join(lines_of(found)), flush=True)
        if found and asked.json is not None:
            write(asked.json, [{"form": name, **one} for name, one in found.items()], kernels.of_collectives("cuda"))


if __name__ == "__main__":
    main()
