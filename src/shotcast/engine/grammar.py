"""Grammars that constrain outputs, compiled by the llguidance library.

Masks are bounded by the library's work counters rather than by time, so all ranks agree on them. Nothing else bounds
the library's time: intersections of a few hundred patterns take minutes. So a separate process compiles grammars before
any rank does, and the operating system kills it if one takes too long.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shotcast import extras
from shotcast.errors import ConfigError

MAX_GRAMMAR_BYTES = 1 << 16
"""The longest grammar: for some schemas, compile time grows with the square of their length."""

MAX_STEP_ITEMS = 20_000
"""Parser items per token; the library counts about 20,000 per millisecond."""

_MAX_COMPILED = 64
"""The number of compiled grammars to keep."""

MOST_MATCHERS, QUICK_S = 16, 0.01
"""The most matchers per grammar, and the compile time in seconds above which a grammar gets only one."""

_MAX_REASON = 300
"""The number of characters of the library's error messages to show."""

_SLICES = [r"[ \n\r\t]+", *(rf'[^"\\\x00-\x1F\x7F]{length}' for length in ("{1,8}", "{1,14}", "{1,22}", "{1,30}", "+"))]
"""Kinds of tokens that a mask treats as one if all of a kind are allowed: spaces, and characters of JSON strings.

With these lengths, masks of 128,000 tokens near the end of bounded strings take 3/4 of the time they take with the
library's defaults.
"""

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""The JSON style: one line, since a model that may write spaces may never stop."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The language of an output.

    Args:
        text: a grammar in llguidance's variant of Lark, or its JSON for several grammars.
        matchers: how many matchers to compile. The library computes the masks of copies of one matcher one by one. The
            client sets the number so that it matches on all ranks: a copy that fails may spoil later ones.

    Raises:
        ConfigError: the grammar is longer than MAX_GRAMMAR_BYTES.
    """

    text: str
    matchers: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise ConfigError("a grammar must not be empty")
        if (size := len(self.text.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
            raise ConfigError(f"the grammar takes {size} bytes; it may take {MAX_GRAMMAR_BYTES}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], strict: bool = True) -> Grammar:
        """Build the grammar of the single-line JSON values that a schema describes.

        Args:
            schema: a JSON schema.
            strict: refuse keywords that cannot be enforced; False ignores them.
        """
        return cls(json.dumps({"grammars": [{"json_schema": styled(schema, strict)}]}))

    @classmethod
    def json_object(cls) -> Grammar:
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ConfigError("a choice must be of one text or more, none of them empty")
        return cls("start: " + " | ".join(map(lark_text, texts)))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Build the grammar of the texts that a regular expression fully matches.

        Raises:
            ConfigError: the library is missing.
        """
        return cls(str(_library().LLMatcher.grammar_from_regex(cls(pattern).text)))

    @classmethod
    def context_free(cls, text: str) -> Grammar:
        """Build a grammar from Lark or GBNF notation, whose first rule is ``start`` or ``root``.

        Raises:
            ConfigError: the grammar cannot be read, or the library is missing.
        """
        cls(text)  # before anything reads it
        try:
            return cls(str(_library().grammar_from("grammar", text)))
        except ValueError as error:
            raise ConfigError(f"the grammar cannot be read: {str(error)[:_MAX_REASON]}") from error


def styled(schema: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """Add the JSON style of :meth:`Grammar.json_schema` to a schema."""
    return {**schema, "x-guidance": _JSON_STYLE | {"lenient": not strict}}


def lark_text(text: str) -> str:
    """Quote a text for use in a grammar."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's vocabulary for compiling grammars. The client sends it to all ranks."""

    tokenizer: str  # in the JSON of Hugging Face's library of tokenizers
    size: int  # columns of the logits, at least as many as there are tokens
    end_tokens: tuple[int, ...]  # the tokens that end a text; without any there are no grammars


@dataclass(slots=True)
class _Compiled:
    """A compiled grammar, as matchers to copy, which are created on demand."""

    matchers: list[Any]
    most: int  # of ``matchers``
    copies: Iterator[int] = field(default_factory=itertools.count)


class GrammarCompiler:
    """Compiles grammars and caches the most recent ones. Thread-safe.

    Matchers allow the first end token of the vocabulary where an output may end.
    Raises ConfigError if the library is missing, or cannot read the tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary):
        library = _library()
        if not vocabulary.end_tokens:
            raise ConfigError("the model has no end token, with which an output by a grammar could end")
        try:
            self._tokenizer = library.LLTokenizer(
                vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=vocabulary.end_tokens[0], slices=_SLICES
            )
        except Exception as error:  # the library raises errors of several types
            raise ConfigError(f"this tokenizer supports no grammars: {str(error)[:_MAX_REASON]}") from error
        self._limits = library.LLParserLimits(step_max_items=MAX_STEP_ITEMS, verbose_errors=False)
        self._words = -(-vocabulary.size // 32)
        self.compile = functools.lru_cache(_MAX_COMPILED)(self._compile)

    def matcher(self, grammar: Grammar) -> tuple[Any, int]:
        """Return a new library matcher at the start of an output, and the number of the matcher it copies.

        Raises:
            ConfigError: the grammar is invalid or too expensive.
        """
        compiled = self.compile(grammar)
        copies = next(compiled.copies)
        if copies >= len(compiled.matchers) < compiled.most:
            compiled.matchers.append(self._new_matcher(grammar))
        number = copies % len(compiled.matchers)
        matcher = compiled.matchers[number].deep_copy()
        if matcher.is_error():  # an earlier copy has used up what they share
            compiled.matchers[number] = self._new_matcher(grammar)
            matcher = compiled.matchers[number].deep_copy()
        return matcher, number

    def _compile(self, grammar: Grammar) -> _Compiled:
        """Compile a grammar, as ``compile`` does unless it is cached. The library releases the interpreter lock.

        Raises:
            ConfigError: as in :meth:`matcher`.
        """
        return _Compiled([self._new_matcher(grammar)], grammar.matchers)

    def _new_matcher(self, grammar: Grammar) -> Any:
        matcher = _library().LLMatcher(self._tokenizer, grammar.text, limits=self._limits, log_level=0)
        mask = np.zeros(self._words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise ConfigError(f"the grammar cannot be compiled: {reason_of(matcher)}")
        return matcher


def mask_executor(threads: int) -> Any:
    """Return the library's thread pool, which computes the masks of several matchers at once."""
    return _library().LLExecutor(num_threads=threads)


def reason_of(matcher: Any) -> str:
    """Return the reason that a matcher failed, in one line."""
    reason = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    if reason.startswith("NoExtension"):
        return "no tokens of the model spell what has to follow"
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."


def _library() -> Any:
    extras.require("engine", "a grammar")
    import llguidance

    return llguidance


COMPILE_S = 0.75
"""CPU seconds that compiling a grammar may take."""

_COMPILE_BYTES = 1 << 30
"""Bytes of memory that compiling a grammar may take."""

_MAX_KNOWN = 256
"""The number of grammars whose results are kept."""


class GrammarChecker:
    """Checks which grammars can be compiled. Thread-safe. The helper process starts with the first grammar."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # of the process
        self._known: OrderedDict[str, str] = OrderedDict()

    def check(self, grammar: Grammar) -> float:
        """Check a grammar and return the seconds it took, 0 if cached. Raises ConfigError on failure or timeout."""
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
        """Return why a grammar is refused ("" if it is accepted), and the seconds it took."""
        if self._process is None:
            self._start()
        try:
            return self._exchange(grammar.text)
        except (OSError, ValueError):  # the process has ended, in the middle of a line or before
            self._end()
            return f"the grammar is too complex: it takes more than {COMPILE_S:g} s or 1 GiB to compile", 0.0

    def _start(self) -> None:
        """Start the process and wait until it has read the vocabulary. Raises ConfigError on failure."""
        root = str(Path(__file__).parents[2])
        code = f"import sys; sys.path.insert(0, {root!r}); from shotcast.engine.grammar import main; main()"
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
