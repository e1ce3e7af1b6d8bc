"""``torchrun -m shotcast serve`` on two simulated hosts of two ranks, with SmolLM2, as the guide has it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from simulated_hosts.network import address_of

from hosts import SimulatedHosts, needs_hosts

pytestmark = [pytest.mark.full, pytest.mark.timing, needs_hosts]

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time", "Water boils at"]
LAYOUTS = [("--tensor-parallel", "4"), ("--tensor-parallel", "2", "--pipeline-parallel", "2")]
SERVE = ["-m", "shotcast", "serve", "smollm2", "--device", "cpu", "--max-model-len", "256"]
PORT = 8000
ASK = f"""
import json, sys, urllib.request
for body in json.loads(sys.argv[1]):
    request = urllib.request.Request("http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(),
        {{"Content-Type": "application/json"}})
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            print(line.decode().strip(), flush=True)
"""


def bodies(length: int, **options: Any) -> list[dict[str, Any]]:
    fixed = {"model": "smollm2", "max_tokens": length, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    return [fixed | {"prompt": prompt} | options for prompt in PROMPTS]


def choices(lines: Sequence[str]) -> list[Any]:
    return [json.loads(line)["choices"] for line in lines]


@contextlib.contextmanager
def served_on_hosts(folder: Path, *options: str) -> Iterator[tuple[SimulatedHosts, list[subprocess.Popen[str]]]]:
    """Serve on two hosts until the end of the block; yields their network and the torchrun of each."""
    agents: list[subprocess.Popen[str]] = []
    with SimulatedHosts(2) as network, contextlib.ExitStack() as stack:
        for host in range(2):
            launch = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "2"]
            launch += ["--master-addr", address_of(0), "--master-port", "29500"]
            command = [sys.executable, "-m", "torch.distributed.run", *launch, *SERVE, "--port", str(PORT), *options]
            log = stack.enter_context((folder / f"host{host}").open("w"))
            agents.append(network.popen(host, command, stdout=log, stderr=log, text=True))
        try:
            until = time.monotonic() + 200
            while "serving smollm2 at" not in printed(folder, 0):
                assert all(agent.poll() is None for agent in agents), printed(folder, 0) + printed(folder, 1)
                assert time.monotonic() < until, printed(folder, 0) + printed(folder, 1)
                time.sleep(0.1)
            yield network, agents
        finally:
            for agent in agents:
                for child in children(agent.pid):  # whose own processes end with them
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                agent.kill()
                agent.wait()


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def printed(folder: Path, host: int) -> str:
    return (folder / f"host{host}").read_text()


def ask(network: SimulatedHosts, requests: list[dict[str, Any]]) -> subprocess.Popen[str]:
    """Start a client on host 0, which prints the answers."""
    return network.popen(0, [sys.executable, "-c", ASK, json.dumps(requests)], stdout=subprocess.PIPE, text=True)


def rank_0(agent: subprocess.Popen[str]) -> int:
    for child in children(agent.pid):
        if b"\0LOCAL_RANK=0\0" in Path(f"/proc/{child}/environ").read_bytes():
            return child
    raise AssertionError("torchrun has no rank 0")


@pytest.mark.parametrize("layout", LAYOUTS, ids=["4x1", "2x2"])
def test_answers_are_those_of_logical_nodes_on_one_host(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Answers agree to the bit: the sums of both have one order. Then rank 0 is told to end; a stream finishes."""
    with served_on_hosts(tmp_path, *layout) as (network, agents):
        assert "vendor library serves" not in printed(tmp_path, 0)
        found = choices(ask(network, bodies(24)).communicate(timeout=300)[0].splitlines())
        client = ask(network, bodies(40, stream=True)[:1])
        assert client.stdout is not None
        client.stdout.readline()
        os.kill(rank_0(agents[0]), signal.SIGTERM)
        rest = client.communicate(timeout=300)[0]
        assert "data: [DONE]" in rest
        assert [agent.wait(60) for agent in agents] == [0, 0]
    command = [sys.executable, *SERVE, "--port", "0", *layout]
    environment = {**os.environ, "SHOTCAST_RANKS_PER_NODE": "2", "COLUMNS": "200"}
    one = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert one.stderr is not None
        port = next(
            match[1] for line in one.stderr if (match := re.search(r"serving .* at http://127\.0\.0\.1:(\d+)/v1", line))
        )
        url = f"http://127.0.0.1:{port}/v1/completions"
        expected = choices([httpx.post(url, json=body, timeout=300).text for body in bodies(24)])
    finally:
        one.terminate()
        one.wait(30)
    assert found == expected
    assert found[0][0]["text"].startswith(" Paris")


@pytest.mark.parametrize("fault", ["killed", "interface"])
def test_a_lost_host_is_named_on_both(tmp_path: Path, fault: str) -> None:
    """A rank of the other host is killed, or the host is cut off: the stream, and both hosts, name it."""
    layout = ["--tensor-parallel", "2", "--pipeline-parallel", "2", "--rank-timeout", "4"]
    with served_on_hosts(tmp_path, *layout) as (network, agents):
        client = ask(network, bodies(200, stream=True)[2:3])
        assert client.stdout is not None
        client.stdout.readline()
        started = time.monotonic()
        if fault == "killed":
            os.kill(children(agents[1].pid)[-1], signal.SIGKILL)
        else:
            network.cut(1)
        rest = client.communicate(timeout=300)[0]
        assert time.monotonic() - started < 15
        (error,) = re.findall(r'data: \{"error":\{"message":"(.*?)","type"', rest)
        assert re.search(r"\b[23]\b", error), error
        assert agents[0].wait(40) == 1
        assert agents[1].wait(40) == 1
    assert re.search(r"the engine died: .*\b[23]\b", printed(tmp_path, 0))
    assert re.search(r"rank [123] ends: rank [023]\b", printed(tmp_path, 1)), printed(tmp_path, 1)
