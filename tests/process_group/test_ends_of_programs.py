"""Programs that end with calls under way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ending_program.py")


CASES = ["callback", pytest.param("waiting", marks=pytest.mark.full), pytest.param("pending", marks=pytest.mark.full)]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_program_ends_without_destroying_its_group(case: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(PROGRAM), case]
    ranks = [
        subprocess.Popen(command, env={**job, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            _, printed = rank.communicate(timeout=300)  # less than the deadline of calls
            assert rank.returncode == 0, printed
            assert "Error" not in printed
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
