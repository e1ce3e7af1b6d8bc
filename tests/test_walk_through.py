"""From a config.json to a started server: what the guide of plans shows, on this machine's CPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

# it measures this machine, which other tests must not use meanwhile
pytestmark = [pytest.mark.full, pytest.mark.timing, pytest.mark.timeout(1800)]


def shotcast(folder: Path, *arguments: str) -> str:
    """Run the command line in a folder, and return what it printed."""
    command = [sys.executable, "-m", "shotcast", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_model(folder: Path) -> None:
    """Write a small model as Transformers does: config.json, weights and a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise).save_pretrained(folder)


def test_from_a_config_to_a_completion(tmp_path: Path) -> None:
    write_model(tmp_path / "mine")
    said = shotcast(tmp_path, "calibrate", "--force", "--output", "here.json", "--cluster", "here.yaml")
    assert "shotcast plan MODEL --cluster here.yaml --calibration here.json --gpus 1" in said

    question = ["mine", "--cluster", "here.yaml", "--calibration", "here.json", "--gpus", "1"]
    question += ["--input", "32", "--output", "16", "--target", "latency", "--json", "plan.json"]
    said = shotcast(tmp_path, "plan", *question)
    planned = json.loads((tmp_path / "plan.json").read_text())
    printed = re.search(r"To start it: (shotcast serve .*)", said)
    assert printed is not None, said
    assert printed[1] == planned["command"]
    assert planned["best"]["precision"] == "fp32"

    program, *arguments = shlex.split(printed[1])
    assert (program, *arguments[:2]) == ("shotcast", "serve", "mine")
    assert arguments[arguments.index("--device") + 1] == "cpu"
    command = [sys.executable, "-m", "shotcast", *arguments, "--port", "0"]
    environment = os.environ | {"COLUMNS": "200"}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            log, port = "", ""
            for line in server.stderr:
                log += line
                if found := re.search(r"serving .* at http://127\.0\.0\.1:(\d+)/v1", line):
                    port = found[1]
                    break
            assert port, log
            body = {"model": "mine", "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=100).json()
            assert answer["usage"]["completion_tokens"] == 8, answer
        finally:
            server.terminate()
            server.wait(60)
