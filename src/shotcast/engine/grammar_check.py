"""A process that compiles grammars before any rank does, and that the system ends when one takes too long.

Nothing else bounds the time of the library: intersections of a few hundred patterns take it minutes.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

from shotcast.engine.grammar import Grammar, GrammarCompiler, Vocabulary
from shotcast.errors import ConfigError

COMPILE_S = 0.75
"""Processor time that a grammar may take."""

_COMPILE_BYTES = 1 << 30
"""Memory that a grammar may take."""

_MAX_KNOWN = 256
"""Grammars whose result is kept."""


class GrammarChecker:
    """Tells which grammars can be compiled. Several threads may use it. The process starts with the first grammar."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # of the process
        self._known: OrderedDict[str, str] = OrderedDict()

    def check(self, grammar: Grammar) -> float:
        """Return the seconds that a grammar took to compile; 0 if it was checked before. Raises ConfigError if it
        cannot be compiled, or takes more than COMPILE_S.
        """
        seconds = 0.0
        reason = self._known.get(grammar.text)  # without the lock, so an event loop may ask for a known grammar
        if reason is None:
            with self._lock:
                if (reason := self._known.get(grammar.text)) is None:
                    reason, seconds = self._compile(grammar)
                    self._known[grammar.text] = reason
                    if len(self._known) > _MAX_KNOWN:
                        self._known.popitem(last=False)
        if reason:
            raise ConfigError(reason)
        return seconds

    def close(self) -> None:
        with self._lock:
            self._end()

    def _compile(self, grammar: Grammar) -> tuple[str, float]:
        """Return why a grammar is refused, "" if it is not, and the seconds that it took."""
        if self._process is None:
            self._start()
        try:
            return self._exchange(grammar.text)
        except (OSError, ValueError):  # the process has ended, in the middle of a line or before
            self._end()
            return f"the grammar is too complex: it takes more than {COMPILE_S:g} s or 1 GiB to compile", 0.0

    def _start(self) -> None:
        """Start the process, and wait until it has read the vocabulary. Raises ConfigError if it cannot."""
        root = str(Path(__file__).parents[2])
        code = f"import sys; sys.path.insert(0, {root!r}); from shotcast.engine.grammar_check import main; main()"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
        vocabulary = self._vocabulary
        try:
            reason, _ = self._exchange([vocabulary.tokenizer, vocabulary.size, vocabulary.end_tokens])
        except (OSError, ValueError):
            reason = "the process that checks grammars has ended"
        if reason:
            self._end()
            raise ConfigError(reason)

    def _exchange(self, message: object) -> tuple[str, float]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        reason, seconds = json.loads(self._process.stdout.readline())
        return reason, seconds

    def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()


def main() -> None:
    """Answer each line of standard input, a vocabulary and then grammars, with a reason and the seconds it took."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the end of the input ends this process
    compiler = None
    for line in sys.stdin:
        message = json.loads(line)
        started, reason = time.perf_counter(), ""
        try:
            if compiler is None:
                compiler = GrammarCompiler(Vocabulary(message[0], message[1], tuple(message[2])))
                _limit_memory()
            else:
                signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # its signal ends the process, whatever that does
                compiler.compile(Grammar(message))
        except ConfigError as error:
            reason = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([reason, time.perf_counter() - started]), flush=True)


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _COMPILE_BYTES,) * 2)
