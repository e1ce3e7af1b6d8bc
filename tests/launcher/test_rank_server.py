"""The server that ranks are forked from: what it imports, and when it starts."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from shotcast.launcher import rank_server


def output_of(script: str) -> object:
    """Return the JSON that a script prints, which ranks may import."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)


def test_the_server_of_an_engine_starts_before_torch_is_imported_and_has_what_its_ranks_need() -> None:
    """Both processes import torch at the same time, and ranks import and collect nothing again."""
    found = output_of(
        """
        import json, sys
        from shotcast.launcher import rank_server

        rank_server.start_for_engine()
        before = rank_server.server._forkserver_pid, "torch" in sys.modules
        import shotcast

        def state():
            import gc, sys
            return ["shotcast.engine.worker" in sys.modules, "transformers" in sys.modules, gc.isenabled()]

        print(json.dumps([*before, rank_server.server._forkserver_pid, *shotcast.spawn(state, 1)]))
        """
    )
    assert isinstance(found, list)
    pid, torch_imported, same, state = found
    assert not torch_imported
    assert pid == same
    assert state == [True, False, True]


@pytest.mark.parametrize(("rank", "starts"), [("0", True), ("1", False)])
def test_only_the_rank_of_a_job_that_starts_processes_has_a_server(
    rank: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(rank_server, "start", lambda *modules: started.append(modules))
    job = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    rank_server.start_for_engine()
    assert bool(started) == starts
