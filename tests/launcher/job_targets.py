"""Functions that ranks run for test_job.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from shotcast import env
from shotcast.errors import ConfigError
from shotcast.launcher.job import JobMember


def member(behaviour: str, folder: str = "") -> None:
    """Serve as a member; rank 2 shows the behaviour, the others work."""
    job = env.job()
    assert job is not None
    chosen = behaviour if job.rank == 2 else behaviour if behaviour == "stuck" else "work"
    if chosen == "absent":
        time.sleep(60)
    if chosen == "secret":
        os.environ["SHOTCAST_SECRET"] = "another"

    def facts() -> tuple[dict[str, str], tuple[str, ...]]:
        if chosen == "lacks":
            raise ConfigError("there is no model here")
        if chosen == "ends":
            os._exit(3)
        length = "512" if chosen == "differs" else "1024"
        return {"max_model_len": length, "dtype": "'float32'"}, (chosen, folder)

    JobMember(job, 5.0).run(facts, work)


def work(behaviour: str, folder: str) -> str:
    job = env.job()
    assert job is not None
    if folder:
        Path(folder, f"begun{job.rank}").touch()
    if behaviour == "stuck":
        time.sleep(600)
    if behaviour == "raises":
        raise ZeroDivisionError("by zero")
    if behaviour == "signals":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    return "done"
