"""What tensor parallelism does to the numbers: replays of one trace by size and order of the sum.

Without --model it makes one of random weights in the named shape, whose logits have a standard
deviation of 4: about 4 nats of entropy over 152k ids. Prints a Markdown table against the
unsplit run of the same dtype.

    python -m benchmarks.parallel_sizes --shape qwen3-0.6b --directory /tmp/sizes
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.reporting import command, compared, point, run_info, value
from benchmarks.shapes import SHAPES, save_random_model


def main() -> None:
    """Record once, replay under every size and order, print the table."""
    options = parse()
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    model = options.model or str(make_model(options.shape, directory / options.shape))
    audit = directory / "audit"
    if not audit.exists():
        prompts = options.prompts or make_prompts(directory / "prompts.jsonl", options.sequences)
        command("record", model, "--prompts", prompts, "-o", audit, "--ignore-eos",
                "--max-tokens", options.max_tokens,
                "--config", options.record_config)  # fmt: skip
    base = ["--config", options.config, "--set", "num_threads=1"]
    command("replay", audit, *base, "--name", "tp1", "--force")
    runs = list(wanted(options))
    for name, keys in runs:
        sets = [part for key in keys for part in ("--set", key)]
        command("replay", audit, *base, *sets, "--name", name, "--force")
    print_table(audit, [name for name, _ in runs])


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Name and keys of every split run."""
    for size in options.sizes:
        keys = [f"tensor_parallel_size={size}", f"parallel.backend={options.backend}"]
        if options.backend == "process":
            yield f"tp{size}-process", keys
            continue
        # With two ranks there is one order.
        for order in ("rank_order", "ring", "tree")[: 1 if size == 2 else 3]:
            yield f"tp{size}-{order}", [*keys, f"reduction={order}"]
        if size > 2:
            yield f"tp{size}-float32-sum", [*keys, "reduction_dtype=float32"]


def print_table(audit: Path, names: list[str]) -> None:
    """Each run against the unsplit one, which itself is set against the record."""
    print("| run | against | mean \\|delta\\| | max | KL | flips | ms a step |")
    print("|---|---|---|---|---|---|---|")
    for baseline, name in [("record", "tp1"), *(("tp1", name) for name in names)]:
        pair = compared(audit, baseline, name)
        info = run_info(audit, name)
        step = 1000 * info["timing"]["engine_seconds"] / info["counters"]["steps"]
        cells = [value(pair, "abs.mean"), point(pair, "abs.max"), value(pair, "kl.mean")]
        print(f"| {name} | {baseline} | {' | '.join(cells)} | {pair['flips']['flips']} of "
              f"{pair['tokens']} | {step:.1f} |")  # fmt: skip


def make_model(shape: str, directory: Path) -> Path:
    """A checkpoint of random bfloat16 weights with a head of its own; made once."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return save_random_model(shape, directory, device=device, tied=False)


def make_prompts(path: Path, count: int) -> Path:
    """Seeded token ids, 48 to 79 a prompt."""
    import random

    draw = random.Random(0)
    prompts = [[draw.randrange(151936) for _ in range(48 + i % 32)] for i in range(count)]
    path.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    return path


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, required=True, help="where everything goes")
    parser.add_argument("--model", help="a model directory or demo, instead of random weights")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--prompts", type=Path, help="instead of random token ids")
    # Eager attention computes row by row: on a GPU the triton configurations are far faster.
    parser.add_argument("--record-config", type=Path, default=Path("configs/fp32-eager.toml"))
    parser.add_argument("--config", type=Path, default=Path("configs/bf16-eager.toml"))
    parser.add_argument("--backend", choices=("emulated", "process"), default="emulated")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
