"""Every command in research/measure.sh can be parsed, and every test that it names exists."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shotcast.cli import app

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "research/measure.sh"
ENDED = "code 0"
USAGE = subprocess.run(["sh", str(SCRIPT)], capture_output=True, text=True, check=False).stderr
PARTS = USAGE.partition("parts: ")[2].split()


def run(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a python3 that records its arguments, one a line, and does nothing else."""
    fake = folder / "python3"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" --- >>"$ASKED"\n')  # one write: parts of the script run at once
    fake.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "ASKED": str(folder / "asked")}
    command = ["sh", str(SCRIPT), str(folder / "out"), *parts]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def understand(arguments: list[str], parser: typer.Typer = app) -> None:
    """Parse a command with the real command line, without running it."""
    command: Any = typer.main.get_command(parser)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context("shotcast", arguments)


def understand_script(path: str, arguments: list[str]) -> None:
    """Parse the options of a script."""
    assert (ROOT / path).is_file()
    module = importlib.import_module(Path(path).stem)
    if hasattr(module, "app"):
        understand(arguments, module.app)
    else:
        module.options().parse_args(arguments)


@pytest.mark.full
def test_every_part_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests/process_group")  # a part runs a script of its
    done = run(tmp_path, *PARTS)
    assert done.returncode == 0, done.stderr
    commands = [
        text.splitlines()
        for text in (tmp_path / "asked").read_text().split("---\n")
        if text and not text.startswith("-c\n")
    ]
    assert len(commands) == len(done.stdout.splitlines()) > 20
    assert all(ENDED in line for line in done.stdout.splitlines())
    names = Counter(line.partition(":")[0] for line in done.stdout.splitlines())
    repeated = [name for name, count in names.items() if count > 1 and not name.startswith("nvidia_")]  # tables grow
    assert not repeated, "the output of one command replaces that of another"
    modules = {"shotcast": 0, "pytest": 0}
    for arguments in commands:
        if arguments[0] != "-m":
            understand_script(arguments[0], arguments[1:])
            continue
        if arguments[1] == "torch.distributed.run":
            assert arguments[2] == "--nproc-per-node"
            understand_script(arguments[4], arguments[5:])
            continue
        modules[arguments[1]] += 1
        if arguments[1] == "shotcast":
            understand(arguments[2:])
            continue
        for argument in arguments:
            file, _, name = argument.partition("::")
            if file.startswith("tests/"):
                text = (ROOT / file).read_text()
                assert not name or f"def {name.partition('[')[0]}(" in text, argument
    assert min(modules.values()) > 5


def test_what_it_does_not_know(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == run(tmp_path, "nonsense").returncode == 2
    assert f"no part nonsense; parts: {PARTS[0]} " in run(tmp_path, "nonsense").stderr


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_table_of_parts_names_all_of_four_and_eight_gpus(ranks: int) -> None:
    page = (ROOT / "research/README.md").read_text().partition("## Four and eight GPUs")[2]
    listed = page.partition("Eight:")[0 if ranks == 4 else 2]
    named = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in listed.splitlines() if "|" in line)))
    line = re.search({4: "four", 8: "eight"}[ranks] + '="([^"]*)"', SCRIPT.read_text())
    assert line is not None
    assert named == set(line[1].split())
