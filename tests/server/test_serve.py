"""``shotcast serve`` as users run it: a process, two ranks, a real model, OpenAI's client."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timing]

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time", "Water boils at", "The opposite of hot is"]


class Served:
    """A server process with its log."""

    def __init__(self, *options: str):
        command = [
            sys.executable,
            "-m",
            "shotcast",
            "serve",
            "smollm2",
            "--port",
            "0",
            "--max-model-len",
            "512",
            *options,
        ]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        self.log: list[str] = []
        self.port = 0
        self._found = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._found.wait(200), "".join(self.log)
        assert self.port, "".join(self.log)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving .* at http://127\.0\.0\.1:(\d+)/v1", line):
                self.port = int(found[1])
                self._found.set()
        self._found.set()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0, timeout=300)

    def ranks(self) -> list[int]:
        """Return the processes of the ranks: the descendants that share a symmetric workspace."""
        found = []
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            pid = int(status.parent.name)
            if self._descends(pid) and b"forkserver" in _read(status) and _threads(pid) > 1:
                found.append(pid)
        return found

    def _descends(self, pid: int) -> bool:
        while pid > 1:
            if pid == self.process.pid:
                return True
            found = re.search(rb"PPid:\t(\d+)", _read(Path(f"/proc/{pid}/status")))
            pid = int(found[1]) if found else 0
        return False

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(200)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _threads(pid: int) -> int:
    found = re.search(rb"Threads:\t(\d+)", _read(Path(f"/proc/{pid}/status")))
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served("--tensor-parallel", "2", "--max-queue", "300")
    yield server
    server.end()


def complete(client: openai.OpenAI, prompt: str, length: int = 16, **options: Any) -> str:
    answer = client.completions.create(model="smollm2", prompt=prompt, max_tokens=length, temperature=0, **options)
    return answer.choices[0].text


@pytest.mark.full
def test_completion_chat_and_stream_agree(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert complete(client, PROMPTS[0]).startswith(" Paris")
    whole = complete(client, PROMPTS[2], 24)
    parts = [
        chunk.choices[0].text
        for chunk in client.completions.create(
            model="smollm2", prompt=PROMPTS[2], max_tokens=24, temperature=0, stream=True
        )
    ]
    assert "".join(parts) == whole
    assert len(parts) > 12
    messages: Any = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    answer = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=40)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 40
    assert complete(client, PROMPTS[1], stop=["8"]).endswith("7, ")


@pytest.mark.full
def test_a_layout_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOTCAST_CALIBRATION", raising=False)
    server = Served("--layout", "auto:2", "--device", "cpu")
    try:
        assert complete(server.client(), PROMPTS[0]).startswith(" Paris")
        assert len(server.ranks()) == 2
        assert "layout 2x1: as many of 2 CPU ranks a stage as a host has, since nothing was measured" in "".join(
            server.log
        )
        assert not any("CUDA" in line for line in server.log), "these are CPU ranks"
        assert server.stop() == 0
    finally:
        server.end()


def test_errors_name_the_problem(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="smollm2", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model="smollm2", prompt="word " * 600)
    assert complete(client, PROMPTS[0], 2)


def test_200_requests_at_once_have_the_outputs_of_one_by_one(served: Served) -> None:
    client = served.client()
    alone = [complete(client, prompt, 4) for prompt in PROMPTS]
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda number: complete(client, PROMPTS[number % len(PROMPTS)], 4), range(200)))
    assert len(answers) == 200
    # In other batches, sums may be rounded differently, which can swap the two best tokens.
    assert sum(answer != alone[number % len(PROMPTS)] for number, answer in enumerate(answers)) <= 2
    metrics = httpx.get(f"http://127.0.0.1:{served.port}/metrics").text
    said = {line.split()[0]: float(line.split()[1]) for line in metrics.splitlines() if line and line[0] != "#"}
    assert max(value for name, value in said.items() if name.startswith("shotcast_requests_total")) >= 200
    assert said["shotcast_ttft_seconds_count"] >= 200
    assert said["shotcast_requests_running"] == 0
    assert said["shotcast_communication_seconds_total"] > 0


def test_a_client_that_disconnects_ends_its_request(served: Served) -> None:
    client = served.client()
    with client.completions.create(
        model="smollm2", prompt=PROMPTS[2], max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    until = time.monotonic() + 100
    while True:
        metrics = httpx.get(f"http://127.0.0.1:{served.port}/metrics").text
        running = re.search(r"^shotcast_requests_running (\S+)", metrics, re.M)
        assert running is not None
        if float(running[1]) == 0:
            return
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.full
def test_a_killed_rank_fails_the_stream_and_ends_the_server() -> None:
    server = Served("--tensor-parallel", "2")
    try:
        client = server.client()
        stream = client.completions.create(
            model="smollm2", prompt=PROMPTS[2], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        ranks = server.ranks()
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="killed by SIGKILL"):
            list(stream)
        assert server.process.wait(200) == 1
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    finally:
        server.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_while_the_model_loads(tmp_path: Path, number: signal.Signals) -> None:
    """A supervisor may do so, and expects that nothing is left behind."""
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")  # a path that is short enough for sockets
    command = [sys.executable, "-m", "shotcast", "serve", "smollm2", "--port", "0", "-t", "2"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "TMPDIR": folder})
    try:
        until = time.monotonic() + 200
        while not list(Path(folder).glob("shotcast-*/engine")) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(200) == 0, (tmp_path / "log").read_text()
        assert os.listdir(folder) == []
        log = (tmp_path / "log").read_text()
        assert log.startswith("loading smollm2")
        assert "Traceback" not in log
        assert "uvicorn.error" not in log, "it says that a server shuts down, when the engine has started too"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)
