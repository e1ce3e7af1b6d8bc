"""Throughput of the frontend: tokens a second through client, output and detokenizing, and through the HTTP server.

    python research/frontend.py [--streams 64] [--tokens 1024] [--steps 0,2.8] [--rounds 3] [--json FILE]

No model runs. A process replaces rank 0 and sends one more token of every request in each step: the tokens of its
prompt, which is a text, over and over. The seed of a request is the time of a step in microseconds; with 0, the tokens
come as fast as the pipe takes them. Everything else is what users run: ``LLM.generate``, and ``shotcast serve`` with
one connection for each stream, all read by one process that only looks for the ends of events. All texts are compared
with the text of their tokens.

tokens/s counts the tokens of all streams from the first request to the end of the last stream. us/token is the
processor time for a token, of the process that detokenizes and serves. tokens/event is the mean number of tokens in an
event of a stream.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from shotcast.engine import worker
from shotcast.engine.async_llm import AsyncLLM
from shotcast.engine.config import EngineConfig
from shotcast.engine.engine_core import ClientConnection
from shotcast.engine.llm import LLM
from shotcast.engine.messages import AbortRequest, EngineCoreOutputs, EngineInfo
from shotcast.engine.outputs import EngineCoreOutput, EngineStats
from shotcast.engine.requests import Request
from shotcast.engine.sampling_params import SamplingParams
from shotcast.hardware.detect import detect
from shotcast.models.presets import preset
from shotcast.server.config import ServerConfig
from shotcast.server.main import run

MODEL = "smollm2"
TEXT = Path(__file__).parent.parent / "docs" / "reference" / "engine.md"
PROMPT_TOKENS = 600


class Running:
    """A request that gets one token in each step."""

    def __init__(self, request: Request):
        self.id, self.prompt, self.length = request.request_id, request.prompt, request.params.max_tokens
        self.count = 0

    def step(self) -> EngineCoreOutput:
        token = self.prompt[self.count % len(self.prompt)]
        self.count += 1
        return EngineCoreOutput(self.id, (token,), None, "length" if self.count == self.length else None)


def emit(config: EngineConfig, address: str, key: bytes) -> None:
    """Replace :func:`shotcast.engine.worker.worker_main`."""
    with Client(address, authkey=key) as connection:
        client = ClientConnection(connection)
        client.send(EngineInfo(preset("smollm2-135m"), 8192, 4096, "float32", 0.0))
        client.start_heartbeat()
        running: dict[str, Running] = {}
        step_s, following = 0.0, 0.0
        while True:
            while not running or client.poll():
                message = client.recv()
                if message is None:
                    client.stop_heartbeat()
                    return
                if isinstance(message, AbortRequest):
                    running.pop(message.request_id, None)
                else:
                    running[message.request_id] = Running(message)
                    step_s = message.params.seed / 1e6
            time.sleep(max(0.0, following - time.perf_counter()))
            following = max(following, time.perf_counter() - step_s) + step_s
            outputs = [one.step() for one in running.values()]
            client.send(EngineCoreOutputs.pack(outputs, EngineStats(running=len(running))))
            for one in outputs:
                if one.finish_reason is not None:
                    del running[one.request_id]


@dataclass(frozen=True)
class Carried:
    """The cost of a round.

    Attributes:
        events: events with text over HTTP; 0 offline.
        busy_s: processor time.
    """

    tokens: int
    seconds: float
    busy_s: float
    events: int = 0


def offline(llm: LLM, prompt: list[int], streams: int, tokens: int, step_us: int) -> Carried:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=step_us)
    started, busy = time.perf_counter(), time.process_time()
    outputs = llm.generate([prompt] * streams, params)
    seconds, busy_s = time.perf_counter() - started, time.process_time() - busy
    expected = spelled(llm.tokenizer, prompt, tokens)
    assert all(output.text == expected for output in outputs)
    return Carried(streams * tokens, seconds, busy_s)


def spelled(tokenizer: Any, prompt: list[int], tokens: int) -> str:
    text: str = tokenizer.decode([prompt[number % len(prompt)] for number in range(tokens)])
    return text


def serve(sender: Connection) -> None:
    """Run ``shotcast serve``."""
    with patch.object(worker, "worker_main", emit):
        engine = AsyncLLM(MODEL)
    sys.exit(run(engine, ServerConfig(port=0), sender.send))


def over_http(
    pid: int, port: int, prompt: list[int], streams: int, tokens: int, step_us: int, expected: str
) -> Carried:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "seed": step_us, "stream": True}
    body = json.dumps(fields | {"ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = head.encode() + b"\r\n\r\n" + body
    selector = selectors.DefaultSelector()
    received: dict[socket.socket, bytearray] = {}
    busy = _busy_s(pid)
    started = time.perf_counter()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        received[connection] = bytearray()
        selector.register(connection, selectors.EVENT_READ)
    for connection in received:
        connection.sendall(request)
    open_streams = streams
    while open_streams:
        for key, _ in selector.select():
            connection = key.fileobj  # type: ignore[assignment]
            piece = connection.recv(1 << 16)
            assert piece, received[connection][-500:].decode()
            received[connection] += piece
            if b"data: [DONE]" in received[connection][-len(piece) - 20 :]:
                selector.unregister(connection)
                open_streams -= 1
    seconds = time.perf_counter() - started
    busy_s = _busy_s(pid) - busy
    events = 0
    for connection, response in received.items():
        connection.close()
        texts = [event["choices"][0]["text"] for event in _events(bytes(response))]
        assert "".join(texts) == expected
        events += len(texts)
    return Carried(streams * tokens, seconds, busy_s, events)


def _events(answer: bytes) -> list[Any]:
    """Return the events of a response in chunks; the last, empty chunk may be missing."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    lines = (line.removeprefix("data: ") for line in body.decode().split("\n\n"))
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def _busy_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def median_round(rounds: Sequence[Carried]) -> Carried:
    """Return the round of median speed."""
    return sorted(rounds, key=lambda one: one.seconds)[(len(rounds) - 1) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each stream")
    parser.add_argument("--steps", default="0,2.8", help="milliseconds of a step of all streams, comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps = [round(1000 * float(step)) for step in options.steps.split(",")]
    found: dict[tuple[str, int], list[Carried]] = {}
    amount = options.streams, options.tokens
    with patch.object(worker, "worker_main", emit):
        llm = LLM(MODEL)
    with llm:
        prompt = llm.tokenizer.encode(TEXT.read_text())[:PROMPT_TOKENS]
        expected = spelled(llm.tokenizer, prompt, options.tokens)
        for step in steps:
            offline(llm, prompt, options.streams, 64, step)
            found["offline", step] = [offline(llm, prompt, *amount, step) for _ in range(options.rounds)]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(sender,))
    server.start()
    try:
        port = receiver.recv()
        assert server.pid is not None
        for step in steps:
            over_http(server.pid, port, prompt, options.streams, 64, step, spelled(llm.tokenizer, prompt, 64))
            found["HTTP", step] = [
                over_http(server.pid, port, prompt, *amount, step, expected) for _ in range(options.rounds)
            ]
    finally:
        server.terminate()
        server.join()
    table = Table(*("way", "step ms", "asked tokens/s", "tokens/s", "spread", "us/token", "tokens/event"))
    rows = []
    for (way, step), rounds in found.items():
        one = median_round(rounds)
        speeds = [each.tokens / each.seconds for each in rounds]
        row = {
            "way": way,
            "step_ms": step / 1000,
            "asked_tokens_s": options.streams / step * 1e6 if step else None,
            "tokens_s": one.tokens / one.seconds,
            "tokens_s_all": speeds,
            "us_token": statistics.median(each.busy_s / each.tokens * 1e6 for each in rounds),
            "tokens_event": one.tokens / one.events if one.events else None,
        }
        rows.append(row)
        table.add_row(
            way,
            f"{step / 1000:g}",
            f"{row['asked_tokens_s']:,.0f}" if step else "all",
            f"{row['tokens_s']:,.0f}",
            f"{(max(speeds) - min(speeds)) / row['tokens_s']:.0%}",
            f"{row['us_token']:.1f}",
            f"{row['tokens_event']:.1f}" if one.events else "-",
        )
    Console().print(table)
    if options.json:
        document = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": "python " + " ".join(sys.argv),
            "environment": detect().as_json(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
