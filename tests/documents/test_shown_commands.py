"""Every command that a document shows is run, or parsed by the real command line where a test cannot run it."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import PAGES, ROOT, Fence, fences, fences_of, without_fences
from typer.testing import CliRunner

from shotcast.cli import app

MAKEFILE = (ROOT / "Makefile").read_text()
SCRIPTS = ("docs/guides/engine.md", "my_script.py")
"""A page and the script of the reader's own that it names."""


def parse(arguments: list[str]) -> Any:
    """Let the command line take the arguments of ``shotcast``, without running the command."""
    command, context = typer.main.get_command(app), None
    name = "shotcast"
    while hasattr(command, "commands"):
        context = command.make_context(name, arguments, parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, arguments = command.resolve_command(context, rest)
        assert command is not None
    return command.make_context(name, arguments, parent=context)


def check(fence: Fence, words: list[str]) -> None:
    """Raise if a command of a block could not be run."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables for the command
        words = words[1:]
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "shotcast":
        parse(arguments)
    elif program == "export":
        name = arguments[0].partition("=")[0]
        assert f"`{name}`" in (ROOT / "docs" / "reference" / "environment.md").read_text()
    elif program == "make":
        targets = [word for word in arguments if "=" not in word]
        assert targets
        assert all(re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE) for target in targets)
    elif program == "pip":
        check_installed(arguments)
    elif program == "torchrun":
        from torch.distributed.run import parse_args

        parsed = parse_args(arguments)
        script = parsed.training_script
        if parsed.module:
            assert script == "shotcast"
            parse(parsed.training_script_args)
            return
        assert (ROOT / script).is_file() or (fence.page.relative_to(ROOT).as_posix(), script) == SCRIPTS
    elif program == "srun":
        assert arguments[:2] == ["bash", "-c"]
        check(fence, shlex.split(re.sub(r"\$\w+", "1", arguments[2])))
    elif program in ("vllm", "sglang"):  # not installed where tests run
        assert arguments[0] == "serve"
    elif program == "python" and arguments[:2] == ["-m", "pytest"]:
        assert all(list(ROOT.glob(path)) for path in arguments[2:] if path.startswith("tests"))
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    else:
        assert (ROOT / program).is_file(), f"{fence.where}: no test knows {program!r}"


def check_installed(arguments: list[str]) -> None:
    """Raise if pip is to install extras that do not exist, or other versions than the Makefile."""
    assert arguments[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in arguments[1:]:
        if found := re.fullmatch(r"\.\[(.*)\]", word):
            assert set(found[1].split(",")) <= set(extras)
        elif word.startswith("llm-"):
            assert word in MAKEFILE


SHELL = fences("sh")


@pytest.mark.parametrize("fence", SHELL, ids=lambda fence: fence.where)
def test_the_command_line_takes_them(fence: Fence) -> None:
    for words in fence.commands():
        check(fence, words)


def test_commands_are_in_blocks_of_shell() -> None:
    """A block without a language would be seen by no test."""
    names = r"^(?:\.venv/bin/)?(?:shotcast|make|pip|python|torchrun|export) .*"
    others = [fence for page in PAGES for fence in fences_of(page) if fence.language != "sh"]
    assert [fence.where for fence in others if re.search(names, fence.body, re.MULTILINE)] == []


def test_commands_within_sentences() -> None:
    """They name a command and options that exist; what follows them may be left out."""
    for page in PAGES:
        for code in re.findall(r"`(shotcast [a-z][^`]*)`", without_fences(page)):
            command, words = typer.main.get_command(app), code.split()[1:]
            while words and hasattr(command, "commands") and not words[0].startswith("-"):
                assert words[0] in command.commands, f"{page.name}: {code}"
                command, words = command.commands[words[0]], words[1:]
            known = {name for option in command.params for name in option.opts}
            assert {word for word in words if word.startswith("-")} <= known, f"{page.name}: {code}"


def test_tests_and_targets_within_sentences() -> None:
    for page in PAGES:
        text = without_fences(page)
        for code in re.findall(r"`(?:\S*python -m )?pytest ([^`]+)`", text):
            absent = [path for path in re.findall(r"(?:\bresearch/)?\btests\S*", code) if not list(ROOT.glob(path))]
            assert absent == [], f"{page.name}: {code}"
        for target in re.findall(r"`make ([a-z-]+)", text):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"{page.name}: make {target}"


@pytest.mark.parametrize(
    "command",
    [
        "shotcast bench engine --layoutt 1x1",
        "shotcast bench enginee",
        "shotcast serve smollm2 --tensor-parallel two",
        "make nothing",
        "pip install '.[engines]'",
        "torchrun --nproc-per-node 2 examples/none.py",
        "torchrun --nproc-per-node 2 -m shotcast serve smollm2 --tensor-parallell 2",
        "srun bash -c 'torchrun --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID -m shotcast serve x --no-option'",
        "nothing --at all",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    wrong = Fence(ROOT / "README.md", 1, "sh", "", command + "\n")
    with pytest.raises(BaseException):  # noqa: B017, PT011  the command line raises errors of several families
        check(wrong, wrong.commands()[0])


RUN = [
    pytest.param(words[1:], id=f"{fence.where} {words[1]}", marks=[pytest.mark.full] if words[1] == "generate" else [])
    for fence in SHELL
    if fence.mark == ""
    for words in fence.commands()
    # the pictures of documents are drawn by research/tests/test_doc_tables.py
    if words[0] == "shotcast" and not (words[1:3] == ["bench", "plot"] and "/images/" in words[3])
]


@pytest.mark.every(4)
@pytest.mark.parametrize("arguments", RUN)
def test_they_run(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write to copies: the pictures and tables of the repository stay as they are."""
    for name in ("README.md", "docs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
