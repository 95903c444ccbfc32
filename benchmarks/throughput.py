"""Tokens a second and decode steps of a replay, beside what else decodes, and beside the floor.

Every side decodes the same prompts to the same number of tokens, in alternating rounds of one run,
in one process (vLLM in one of its own, in the same rounds). Ratios are made round by round. Prints
Markdown tables; what does not run here is a row that says why.

    python -m benchmarks.throughput                                # the demo model
    python -m benchmarks.throughput --model qwen3-4b --rows 64 --context 1024 --tokens 32 \\
        --device cuda --set compile=true --peer vllm --json throughput.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import progress
from benchmarks.shapes import SHAPES
from trace_audit.errors import TraceAuditError

SIDES = {
    "replay": "replay, all statistics",
    "free": "free decoding, all statistics, `enable_trace_replay` off",
    "plain": "likeliest token alone: no overwrite, statistics or storage",
    "generate": "transformers `generate`",
    "generate-static": "transformers `generate`, static cache, compiled",
    "generate-batch": "transformers `generate_batch`, sdpa",
}
PEERS = {"vllm": "vLLM"}
OWN = ("replay", "free", "plain")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds, print the tables."""
    options = parse(arguments)
    decide(options)
    from benchmarks.throughput_sides import Bench
    from benchmarks.throughput_tables import as_json, tables

    try:
        bench = Bench(options)
        rounds = bench.run()
    except TraceAuditError as error:
        progress(f"{error.message}\n{error.hint or ''}".rstrip())
        return error.exit_code
    print("\n".join(tables(bench, rounds)))
    if options.json:
        values = {"command": command_line(arguments), **as_json(bench, rounds)}
        write_json(options.json, values)
    return 0


def decide(options: argparse.Namespace) -> None:
    """Decide device and dtype, and tell Triton before its import whether it is interpreted."""
    import torch

    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if options.dtype == "auto":
        # Without them oneDNN emulates bfloat16, many times as slow as float32.
        has_products = options.device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        options.dtype = "bfloat16" if has_products else "float32"


def command_line(arguments: Sequence[str] | None) -> str:
    """This command, as one types it."""
    own = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", "benchmarks.throughput", *own])


def write_json(path: Path, values: dict[str, Any]) -> None:
    """One document; a value that is no JSON is an error."""
    text = json.dumps(values, indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What both throughput and scaling ask of the engine."""
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto: bfloat16, or float32 on a CPU that has no products of it",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
                        help="a key of [engine], as replay --set takes it")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything that was measured here")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="demo",
        help=f"a directory, demo, a hub id, or a shape: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="write a shape's weights here and load them; default: in memory",
    )
    parser.add_argument("--rows", type=int, default=32, help="sequences, all in one batch")
    parser.add_argument(
        "--context",
        type=int,
        help="prompts of so many random ids; default: questions in the model's "
        "tokens, 128 for a shape",
    )
    parser.add_argument("--tokens", type=int, default=128, help="decoded in every row")
    parser.add_argument(
        "--only", nargs="+", choices=SIDES, metavar="SIDE", help=f"some of {', '.join(SIDES)}"
    )
    parser.add_argument("--logprobs", action="store_true",
                        help="have transformers' sides give each token's logprob, and `generate` "
                        "its rank")  # fmt: skip
    parser.add_argument("--peer", choices=PEERS, help="in a process of its own")
    parser.add_argument("--peer-python", help="interpreter that has it; default: this one")
    parser.add_argument("--peer-logprobs", type=int, metavar="N",
                        help="have it return the logprobs of the N best tokens")  # fmt: skip
    add_model_options(parser)
    options = parser.parse_args(arguments)
    for name in ("rows", "tokens", "rounds", "context"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is not 1 or more")
    if options.directory is not None and options.model not in SHAPES:
        parser.error(f"--directory is for shapes, and {options.model} is none")
    return options


def wanted(options: argparse.Namespace) -> list[str]:
    """Names of the sides, in the order of the table."""
    names = [name for name in SIDES if name in (options.only or SIDES)]
    return names + ([options.peer] if options.peer else [])


def label(options: argparse.Namespace, name: str) -> str:
    """What a side's row is called."""
    if name in PEERS and options.peer_logprobs is not None:
        return f"{PEERS[name]}, {options.peer_logprobs} logprobs"
    if options.logprobs and name.startswith("generate"):
        told = "logprobs" if name == "generate-batch" else "logprobs and ranks"
        return f"{SIDES[name]}, {told}"
    return (SIDES | PEERS)[name]


if __name__ == "__main__":
    sys.exit(main())
