"""Models of the Hugging Face Hub, by name: what the cache has, and what is downloaded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

from shotcast import env
from shotcast.engine.client import _serve_as_member
from shotcast.engine.config import EngineConfig
from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.models.hub import config_file, is_hub_name
from shotcast.models.source import find_model, locate, open_checkpoint
from shotcast.planner.model_name import named_model

OLD, NEW = "a" * 40, "b" * 40
GATED = r"\(gated models: first hf auth login, or set HF_TOKEN\)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub without network, in a folder that has no folder of a model's name."""
    for name in ("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def no_network(*args: object, **options: object) -> None:
        raise OSError("Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    return tmp_path / "cache"


def put(cache: Path, name: str, commit: str, reference: str = "") -> Path:
    """Return the new folder of a snapshot, which a branch or a tag may refer to."""
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    if reference:
        (repository / "refs" / reference).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
    return folder


def save(folder: Path, shard: str = "50GB") -> None:
    torch.manual_seed(len(str(folder)))
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard)


@pytest.mark.parametrize("name", ["org/name", "meta-llama/Llama-3.2-1B", "a/b@v1.0", "a/b@refs/pr/1"])
def test_names_of_the_hub(name: str) -> None:
    assert is_hub_name(name)
    huggingface_hub.utils.validate_repo_id(name.partition("@")[0])


@pytest.mark.parametrize(
    "name", ["name", "/a", "a/b/c", "./a", "~/a", "../a", "a/b@", "a/", "a b/c", "a/b\n", "random:x/y"]
)
def test_other_names(name: str) -> None:
    assert not is_hub_name(name)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "~/elsewhere"},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "/h", "HF_HUB_CACHE": "$HF_HOME/c", "HF_HUB_OFFLINE": "yes"},
        {"HF_HUB_OFFLINE": "0"},
        {"TRANSFORMERS_OFFLINE": "1"},
    ],
)
def test_variables_mean_what_they_mean_to_the_library(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE)"
    theirs = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    assert f"{env.hub_cache()} {env.hub_offline()}" == theirs.strip()


def test_the_cache_is_read_as_the_library_reads_it(cache: Path) -> None:
    for commit, reference in ((OLD, "v1"), (NEW, "main"), (OLD, "refs/pr/1")):
        save(put(cache, "org/name", commit, reference))
    for revision in ("", "@main", "@v1", "@refs/pr/1", f"@{OLD}", f"@{NEW}"):
        theirs = huggingface_hub.try_to_load_from_cache(
            "org/name", "config.json", cache_dir=cache, revision=revision[1:] or None
        )
        assert isinstance(theirs, str)
        assert find_model(f"org/name{revision}") == Path(theirs).parent
        assert config_file(f"org/name{revision}") == Path(theirs)
    for absent in ("org/other", "org/name@v2", f"org/name@{'c' * 40}"):
        with pytest.raises(ConfigError, match="does not have all of it"):
            find_model(absent)
    assert open_checkpoint("org/name").config == open_checkpoint(str(find_model("org/name"))).config
    assert named_model("org/name").name == "org/name"
    assert named_model("org/name").config.layers == 2


def test_a_folder_of_that_name_comes_first(cache: Path) -> None:
    save(put(cache, "org/name", NEW, "main"))
    Path("org/name").mkdir(parents=True)
    assert find_model("org/name") == Path("org/name")


def test_without_network_the_error_says_what_helps(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = rf"^meta-llama/Llama-3\.1-8B is no folder.*{cache}.*Name or service not known\); by hand: "
    wanted += rf"hf download meta-llama/Llama-3\.1-8B {GATED}$"
    for find in (find_model, named_model):
        with pytest.raises(ConfigError, match=wanted) as caught:
            find("meta-llama/Llama-3.1-8B")
        assert "random:" not in str(caught.value)
    with pytest.raises(ConfigError, match=rf"hf download a/b --revision v1 {GATED}$"):
        find_model("a/b@v1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=rf"HF_HUB_OFFLINE forbids .*: hf download a/b {GATED}$"):
        find_model("a/b")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        find_model("a/b")


def test_the_library_reports_a_lost_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def unknown(*args: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"downloaded \(.*Name or service not known\); .*hf download org/nowhere "):
        find_model("org/nowhere")


class Hub:
    """A stand-in for the Hub that puts files into the cache as the library does."""

    def __init__(self, cache: Path, origin: Path):
        self.cache, self.origin, self.asked = cache, origin, []

    def download(self, name: str, revision: str | None, cache_dir: str, **patterns: Any) -> str:
        from huggingface_hub.utils import filter_repo_objects

        assert cache_dir == str(self.cache)
        files = [str(file.relative_to(self.origin)) for file in self.origin.rglob("*") if file.is_file()]
        taken = sorted(filter_repo_objects(files, **patterns))
        self.asked.append((name, revision, taken))
        folder = put(self.cache, name, NEW, revision or "main")
        for file in taken:
            (folder / file).write_bytes((self.origin / file).read_bytes())
        return str(folder)


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(cache, tmp_path / "origin")
    save(found.origin, "20KB")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.download)
    return found


def test_a_download_takes_what_the_engine_reads(hub: Hub) -> None:
    wanted = {file.name for file in hub.origin.iterdir()} | {"tokenizer.json", "tokenizer.model", "merges.txt"}
    wanted |= {"chat_template.jinja", "vocab.json"}
    assert "model.safetensors.index.json" in wanted
    (hub.origin / "original").mkdir()
    for name in (*wanted, "consolidated.safetensors", "model.bin", "README.md", "model.gguf", "original/x.safetensors"):
        (hub.origin / name).touch()
    folder = find_model("org/name@v1")
    assert [(name, revision) for name, revision, _ in hub.asked] == [("org/name", "v1")] * 2
    assert hub.asked[0][2] == ["config.json"]
    assert set(hub.asked[1][2]) == wanted
    assert find_model("org/name@v1") == folder
    assert len(hub.asked) == 2, "what the cache has is not downloaded again"


def test_a_plan_downloads_no_weights(hub: Hub) -> None:
    assert named_model("org/name").config.layers == 2
    assert hub.asked == [("org/name", None, ["config.json"])]
    open_checkpoint("org/name").close()  # completes what the plan began
    assert hub.asked[-1][2] == sorted(file.name for file in hub.origin.iterdir())


def test_unsupported_architectures_are_refused_before_a_download(hub: Hub) -> None:
    config = {"architectures": ["MixtralForCausalLM"]}
    (hub.origin / "config.json").write_text(json.dumps(config))
    wanted = "architecture MixtralForCausalLM is not supported; accepted: LlamaForCausalLM, "
    with pytest.raises(UnsupportedError, match=wanted):
        find_model("org/name")
    assert hub.asked == [("org/name", None, ["config.json"])]


def test_incomplete_snapshots(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_model("org/name")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    assert find_model("org/name") == folder
    assert lost.is_file()
    lost.unlink()
    # without network, the library returns the snapshot that there is
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(folder))
    with pytest.raises(ConfigError, match=rf"is incomplete: .* lacks {lost.name}, .*hf download org/name {GATED}$"):
        find_model("org/name")


@pytest.mark.full
def test_all_ranks_read_the_folder_that_their_parent_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch moves to an empty snapshot while the ranks start."""
    from shotcast.launcher.spawn import RankGroup

    first = put(cache, "org/name", OLD, "main")
    save(first)
    start = RankGroup.start

    def moved(*args: Any, **options: Any) -> RankGroup:
        put(cache, "org/name", NEW, "main")
        return start(*args, **options)

    prompt, params = [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(first), tensor_parallel=2, device="cpu", max_model_len=64) as llm:
        wanted = llm.generate(prompt, params)[0].tokens
    monkeypatch.setattr(RankGroup, "start", moved)
    with LLM("org/name", tensor_parallel=2, device="cpu", max_model_len=64) as llm:
        assert llm.config.model == "org/name"
        assert llm.generate(prompt, params)[0].tokens == wanted
    with pytest.raises(ConfigError):
        locate("org/name")
    assert os.path.samefile(locate(f"org/name@{OLD}"), first)


def test_a_rank_of_a_job_reads_the_files_that_it_compared(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Member:
        def run(self, facts: Any, serve: object) -> None:
            self.facts, (self.config,) = facts()

    folder = put(cache, "org/name", OLD, "main")
    save(folder)
    member: Any = Member()
    _serve_as_member(EngineConfig("org/name", device="cpu"), member)
    put(cache, "org/name", NEW, "main")
    assert Path(member.config.model) == folder
    assert {"config.json", "model.safetensors"} <= member.facts.keys()
