"""What each numerical switch does to a model, and how much of it is noise.

Records once in float32, measures the floors of float32 and of a half-precision baseline (run again,
and run with the sequences in other orders), then replays the baseline with one key changed at a
time. Prints two Markdown tables. A switch that the machine refuses is a row that says so.

    python -m benchmarks.axes --directory /tmp/axes
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.reporting import command, compared, point, run_info, value
from benchmarks.workload import QUESTIONS, TOPICS

BASE = "bf16"
AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("prefill", ("path=prefill",)),
    ("batch-1", ("max_num_seqs=1",)),
    ("fixed-batch", ("fixed_batch=true",)),
    ("kv-fp8-e4m3", ("kv_cache_dtype=fp8_e4m3",)),
    ("kv-fp8-e5m2", ("kv_cache_dtype=fp8_e5m2",)),
    ("kv-int8", ("kv_cache_dtype=int8",)),
    ("w-int8", ("quantization=int8_weight_only",)),
    ("w-int4", ("quantization=int4_weight_only",)),
    ("w-fp8", ("quantization=fp8",)),
    ("compile", ("compile=true",)),
    ("ngram", ("speculative.method=ngram",)),
    ("fp32-head", ("lm_head_dtype=float32",)),
)


def main() -> None:
    """Record, replay, print."""
    options = parse()
    audit: Path = options.directory / "audit"
    if not audit.exists():
        prompts = options.prompts or write_questions(options.directory / "questions.jsonl")
        command("record", options.model, "--prompts", prompts, "-o", audit,
                "--max-tokens", options.max_tokens, "--ignore-eos", "--set",
                f"device={options.device}", "--set", f"attention_backend={options.backend}",
                "--set", f"max_num_seqs={options.max_num_seqs}",
                "--set", f"num_threads={options.num_threads}")  # fmt: skip
    shared = ["--set", f"device={options.device}",
              "--set", f"attention_backend={options.backend}",
              "--set", f"num_threads={options.num_threads}"]  # fmt: skip
    print_floors(audit, shared, options)
    print_axes(audit, shared, options)


def write_questions(path: Path) -> Path:
    """Every question of the benchmarks about every topic, as a prompt file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), "utf-8")
    return path


def print_floors(audit: Path, shared: list[str], options: argparse.Namespace) -> None:
    """What repeats differ by: the same schedule, and shuffled ones."""
    print("| run | repeated | pairs | rows that differ | mean \\|delta\\| | max | KL | flips |")
    print("|---|---|---|---|---|---|---|---|")
    for name, dtype in (("fp32", "float32"), (BASE, "bfloat16")):
        sets = [*shared, "--set", f"dtype={dtype}", "--set", f"max_num_seqs={options.max_num_seqs}"]
        kinds = ["--repeat-kind", "rerun", "--repeat-kind", "batch"]
        if not (audit / "runs" / name).exists():
            command("replay", audit, "--config", options.config, *sets, "--name", name,
                    "--repeat", options.repeats, *kinds)  # fmt: skip
        for kind, suffix in (("same schedule", "repeat"), ("shuffled", "batch")):
            names = [f"{name}-{suffix}{i}" for i in range(2, options.repeats + 1)]
            pairs = [compared(audit, name, other) for other in names]
            print(f"| {name} | {kind} | {len(pairs)} | {' | '.join(worst_of(pairs))} |")
    print()


def worst_of(pairs: list[dict[str, Any]]) -> list[str]:
    """The largest of each figure over the pairs."""
    unequal = max(pair["unequal_rows"] for pair in pairs)
    metrics = [
        max((point(pair, name) for pair in pairs), key=float)
        for name in ("abs.mean", "abs.max", "kl.mean")
    ]
    flips = max(pair["flips"]["flips"] for pair in pairs)
    return [f"{unequal} of {pairs[0]['tokens']}", *metrics, str(flips)]


def print_axes(audit: Path, shared: list[str], options: argparse.Namespace) -> None:
    """The baseline against the record, then one key changed at a time against the baseline."""
    print("| run | against | mean \\|delta\\| | max | KL | flips (hard) | onset |")
    print("|---|---|---|---|---|---|---|")
    print(row(audit, "record", BASE))
    for name, keys in AXES:
        if options.only is not None and name not in options.only:
            continue
        sets = [*shared, "--set", "dtype=bfloat16"]
        if not any(key.startswith("max_num_seqs") for key in keys):
            sets += ["--set", f"max_num_seqs={options.max_num_seqs}"]
        sets += [part for key in keys for part in ("--set", key)]
        try:
            command("replay", audit, "--config", options.config, *sets, "--name", name, "--force")
        except subprocess.CalledProcessError as error:
            print(f"| {name} | {BASE} | not run: exit code {error.returncode} | | | | |")
            continue
        print(row(audit, BASE, name), flush=True)


def row(audit: Path, baseline: str, name: str) -> str:
    """One comparison as a row."""
    pair = compared(audit, baseline, name)
    onset = (pair["structure"] or {}).get("onset")
    where = "none"
    if onset is not None:
        stays = "persistent" if onset["persistent"] else "not persistent"
        where = f"{onset['position']}, {stays}"
    flips = f"{pair['flips']['flips']} ({pair['flips']['hard']}) of {pair['tokens']}"
    cells = [value(pair, "abs.mean"), point(pair, "abs.max"), value(pair, "kl.mean"), flips, where]
    accepted = run_info(audit, name)["counters"].get("accepted_draft_tokens") or 0
    label = f"{name}, {accepted} drafts accepted" if accepted else name
    return f"| {label} | {baseline} | {' | '.join(cells)} |"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, required=True, help="where everything goes")
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--prompts", type=Path, help="default: the 35 questions of benchmarks.workload"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="sdpa", help="attention backend of every run")
    parser.add_argument("--config", type=Path, default=Path("configs/bf16-sdpa.toml"))
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads; 0: all cores")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--max-num-seqs", type=int, default=32, help="below the prompts: mates vary"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of axes; none: the floors alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
