"""Time the tokens of rows that a JSON schema constrains, against those of unconstrained ones.

    python research/quantized_checkpoint.py llama-3.1-8b bf16-cycles FOLDER
    python research/constrained_rows.py FOLDER --device cuda --json constrained_rows.json

All rows sample at temperature 1. None, every other one, or all of them are constrained, in turns; or all of them by a
schema that bounds its strings, near whose ends a mask takes ten times as long. Random weights keep to a schema
only because they have to, and its text never ends within the tokens. A folder without a tokenizer gets
one, with all tokens of the model, trained on Python's own library.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shotcast import LLM, SamplingParams
from shotcast.engine.grammar import Grammar
from shotcast.engine.outputs import RequestOutput
from shotcast.hardware.detect import detect


def schema(**bounds: int) -> Grammar:
    trip = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome", "Lima"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 30},
            "why": {"type": "string", **bounds},
        },
        "required": ["city", "days", "why"],
        "additionalProperties": False,
    }
    return Grammar.json_schema({"type": "array", "items": trip, "minItems": 200, "maxItems": 400})


CONSTRAINED = {"none": (0, None), "half": (2, schema()), "all": (1, schema()), "bounded": (1, schema(maxLength=60))}
"""The number of rows of which one is constrained, 0 for none, and its grammar."""


def train_tokenizer(folder: Path) -> None:
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library = map(str, sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")))
    end = "<|end|>"
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    backend.train([name for name in library if readable(name)], trainer)
    backend.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def readable(name: str) -> bool:
    try:
        Path(name).read_text()
    except UnicodeDecodeError:
        return False
    return True


def gaps_ms(outputs: list[RequestOutput]) -> list[float]:
    pairs = (pair for output in outputs for pair in itertools.pairwise(output.times_s))
    return [1e3 * (after - before) for before, after in pairs]


def measure(llm: LLM, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds between tokens of rows, by how many are constrained: medians of the rounds."""
    medians: dict[str, list[float]] = {kind: [] for kind in CONSTRAINED}
    for turn in range(rounds + 1):
        for kind, (every, grammar) in CONSTRAINED.items():
            grammars = [grammar if every and row % every == 0 else None for row in range(rows)]
            params = [
                SamplingParams(max_tokens=tokens, seed=row, grammar=each, ignore_eos=each is None)
                for row, each in enumerate(grammars)
            ]
            prompts = [[row + 1, *range(2, 32)] for row in range(rows)]
            outputs = llm.generate(prompts, params)
            for output, each in zip(outputs, params, strict=True):
                assert len(output.tokens) == tokens, output.error
                assert each.grammar is None or re.match(r'\[\{"city": ?"(Oslo|Rome|Lima)", ?"days": ?', output.text)
            if turn:  # the first warms up
                medians[kind].append(statistics.median(gaps_ms(outputs)))
    found = {kind: statistics.median(each) for kind, each in medians.items()}
    return {"rows": rows, "itl_ms": found, "of_none": {kind: each / found["none"] for kind, each in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(args.model)
    if folder.is_dir() and not (folder / "tokenizer.json").exists():
        train_tokenizer(folder)
    options = {"device": args.device, "max_model_len": 64 + args.tokens, "max_num_seqs": max(args.rows)}
    with LLM(args.model, **options) as llm:
        found = []
        for rows in args.rows:
            found.append(measure(llm, rows, args.tokens, args.rounds))
            print(found[-1], flush=True)
    if args.json is not None:
        result = {
            "hardware": str(detect()),
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "cores": os.cpu_count(),
            "tokens": args.tokens,
            "measured": found,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
