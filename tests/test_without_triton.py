"""Everything but kernels of GPUs works where Triton is not installed, as beside the CPU builds of PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

IMPORTS = """
import importlib, pkgutil
import shotcast
for module in pkgutil.walk_packages(shotcast.__path__, "shotcast."):
    extends_another_program = ".vllm_" in module.name or module.name.endswith(".ray_group")
    if "triton" not in module.name.split(".") and not extends_another_program:
        importlib.import_module(module.name)
"""
GENERATES = """
import sys
import torch
import shotcast
from shotcast import LLM, SamplingParams

def sums():
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        return comm.all_reduce(torch.ones(8)).tolist()

if __name__ == "__main__":
    assert shotcast.spawn(sums, 2, timeout_s=120) == [[2.0] * 8] * 2
    with LLM(sys.argv[1], tensor_parallel=2, device="cpu", max_model_len=64) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.tokens) == 4
    assert not any(name.split(".")[0] == "triton" for name in sys.modules)
"""


@pytest.fixture
def without_triton(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which ``import triton`` fails as where it is not installed."""
    hidden = tmp_path / "hidden" / "triton"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(hidden.parent), *sys.path])}


def run(script: str, env: dict[str, str], folder: Path, *arguments: str) -> None:
    file = folder / "script.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, file, *arguments], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_modules_can_be_imported(without_triton: dict[str, str], tmp_path: Path) -> None:
    run(IMPORTS, without_triton, tmp_path)


@pytest.mark.timing
def test_ranks_sum_and_a_model_generates(without_triton: dict[str, str], tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = tmp_path / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    run(GENERATES, without_triton, tmp_path, str(model))
