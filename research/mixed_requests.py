"""Serve constrained requests among plain ones, and hold the time between tokens against that of plain requests alone.

    python research/mixed_requests.py --json benchmarks/data/cpu/exploration/mixed_requests.json

The clients of a round send their requests at once, and stream the answers: all of them plain, or every other one with a
JSON schema. Rounds of both kinds take turns. Every constrained answer is validated. The result has, for each kind of
round, the median of the seconds between two tokens of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import jsonschema
import openai

from shotcast.hardware.detect import detect

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "why": {"type": "string", "maxLength": 60},
    },
    "required": ["city", "days", "why"],
    "additionalProperties": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}},
)
MAX_TOKENS = 48


async def answer(client: openai.AsyncOpenAI, number: int, options: dict[str, Any]) -> list[float]:
    """Stream an answer and validate it. Return the times at which its tokens came."""
    messages = [{"role": "user", "content": f"Plan trip {number}, in a few words."}]
    stream: Any = await client.chat.completions.create(
        model="served", messages=messages, seed=number, stream=True, max_tokens=MAX_TOKENS, **options
    )
    times, text, finished = [], "", ""
    async for chunk in stream:
        for choice in chunk.choices:
            if piece := choice.delta.content or "":
                times.append(time.perf_counter())
            text += piece
            finished = choice.finish_reason or finished
    assert finished in ("stop", "length"), finished
    if options and finished != "length":
        jsonschema.validate(json.loads(text), SCHEMA)
    return times


async def measure(url: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """Return the rounds: the median seconds between tokens of plain and of constrained answers, and all tokens/s."""
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    found = []
    for turn in range(-2, 2 * rounds):  # the first two warm up
        kinds = KINDS if turn % 2 else KINDS[:1]
        began = time.perf_counter()
        options = [kinds[number % len(kinds)] for number in range(clients)]
        answers = await asyncio.gather(*(answer(client, number, each) for number, each in enumerate(options)))
        seconds = time.perf_counter() - began
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for each, times in zip(options, answers, strict=True):
            gaps[not each] += [after - before for before, after in itertools.pairwise(times)]
        one = {
            "mixed": len(kinds) > 1,
            "plain_ms": 1e3 * statistics.median(gaps[True]),
            "constrained_ms": 1e3 * statistics.median(gaps[False]) if gaps[False] else None,
            "tokens_per_s": sum(map(len, answers)) / seconds,
        }
        print(one, flush=True)
        if turn >= 0:
            found.append(one)
    return found


def read_to_the_end(stream: IO[str]) -> None:
    """Read what nobody needs, until the stream is closed."""
    with contextlib.suppress(ValueError):
        for _ in stream:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve", nargs="*", default=["--device", "cpu", "--max-model-len", "512"])
    args = parser.parse_args()
    command = [sys.executable, "-m", "shotcast", "serve", args.model, "--served-model-name", "served", "--port", "0"]
    with subprocess.Popen([*command, *args.serve], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            found = (re.search(r"http://\S+/v1", line) for line in server.stderr)
            url = next(address[0] for address in found if address)
            # a server whose log nobody reads waits once the pipe is full
            threading.Thread(target=read_to_the_end, args=(server.stderr,), daemon=True).start()
            rounds = asyncio.run(measure(url, args.clients, args.rounds))
        finally:
            server.terminate()
    plain, mixed = (
        statistics.median(one["plain_ms"] for one in rounds if one["mixed"] is kind) for kind in (False, True)
    )
    print(
        f"plain answers, ms between tokens: {plain:.2f} alone, {mixed:.2f} among constrained ones ({mixed / plain:.3f})"
    )
    if args.json is not None:
        result = {
            "hardware": str(detect()),
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "model": args.model,
            "clients": args.clients,
            "cores": os.cpu_count(),
            "rounds": rounds,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
