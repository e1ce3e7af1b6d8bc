"""Engines in processes take their steps in turns, and one that ends holds up nobody."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import vllm_engines

FAKE = """
import os, signal, subprocess, sys
import vllm_engines

class Engine:
    def __init__(self, folder):
        if NAME == "broken":
            raise SystemExit(1)

    def times(self, asked):
        with open(LOG, "a") as log:
            print(NAME, asked["batch"], file=log)
        print("what vLLM prints is no answer")
        return {"ms": asked["batch"] * FACTOR, "tokens": [1]}

    def likelihoods(self, asked):
        return {"digests": ["a"] * 9 + [NAME]}

    def fault(self, asked):
        stopped = subprocess.Popen(["sleep", "600"])
        stopped.send_signal(signal.SIGSTOP)
        with open(LOG + NAME, "w") as file:
            print(stopped.pid, file=file)
        os._exit(asked["signal"])

vllm_engines.Engine = Engine
vllm_engines.serve(os.fdopen(int(sys.argv[1]), "w"))
"""


def ended(pid: int) -> bool:
    """Return whether a process has ended; nobody may have waited for it yet."""
    try:
        psutil.Process(pid).wait(timeout=5)
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        pass
    return True


@pytest.mark.full
def test_engines_take_turns(tmp_path: Path) -> None:
    log, children, found = tmp_path / "steps", {}, {}
    for name, factor in (("vLLM", 1.0), ("plug-in", 0.5), ("broken", 1.0)):
        script = tmp_path / f"{name}.py"
        script.write_text(f"NAME, FACTOR, LOG = {name!r}, {factor}, {str(log)!r}\n{FAKE}")
        more = {"PYTHONPATH": str(Path(vllm_engines.__file__).parent)}
        children[name] = vllm_engines.Child([sys.executable, str(script)], more, tmp_path / f"{name}.log")
    try:
        vllm_engines.in_turns(children, 2, 9, found)
        gone = [ended(int((tmp_path / f"steps{name}").read_text())) for name in ("vLLM", "plug-in")]
    finally:
        for child in children.values():
            child.end()
    steps = [f"{name} {batch}" for batch in (1, 8, 64, 256) for _ in range(2) for name in ("vLLM", "plug-in")]
    assert log.read_text().splitlines() == steps
    assert found["broken"] == {"failed": True}
    assert found["plug-in"]["ms"] == {"1": [0.5, 0.5], "8": [4.0, 4.0], "64": [32.0, 32.0], "256": [128.0, 128.0]}
    assert "fault" not in found["vLLM"], "it ended without an answer"
    assert gone == [True, True], "a stopped process ends with its engine"
    text = vllm_engines.lines_of(found)
    assert text[2].startswith("plug-in: ms a token by sequences 1: 0.500 (0.500), 8: 4.000 (0.500), 64: ")
    assert text[3] == "  2 different log-probabilities in 10 batches"
    assert text[4] == "broken: ms a token by sequences none"


def test_prompts_differ() -> None:
    prompts = [tuple(vllm_engines.prompt_of(number, 32)) for number in range(256)]
    assert len(set(prompts)) == 256
    assert all(0 <= token < vllm_engines.SHAPE["vocab_size"] for prompt in prompts for token in prompt)
