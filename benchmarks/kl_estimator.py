"""The fixed-support KL estimate against exact KL, at the same positions of the demo model.

Records a greedy trace with whole distributions at some positions, replays it under candidates that
differ in kind (dtype, rounded weights, backend, 1 % of positions broken), and prints Markdown
tables of what `diff report` says of both, KL(record || run) and KL(run || record).

    python -m benchmarks.kl_estimator --directory /tmp/kl-estimator

The audit stays in the directory; runs that are there already are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.reporting import command
from trace_audit.diff.agreement import Agreement
from trace_audit.diff.batches import aligned_batches
from trace_audit.diff.compare import compare
from trace_audit.diff.kl import FixedSupport, fixed_support, fixed_support_kl
from trace_audit.diff.pair_rows import PairRows
from trace_audit.diff.source import RECORD, AuditSource
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.schema import SUPPORT_TOP_K

PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
BROKEN_SHARE = 0.01
# Run -> standard deviation of what is added to every logit of a broken position.
BROKEN = {"broken-mild": 1.0, "broken": 2.0}
FLOAT32 = ("float32", "eager")
# Run -> (dtype, backend, bits of rounded weights).
CANDIDATES: dict[str, tuple[str, str, int | None]] = {
    "fp32-sdpa": ("float32", "sdpa", None),
    "bf16": ("bfloat16", "sdpa", None),
    "fp16": ("float16", "sdpa", None),
    "int8": (*FLOAT32, 8),
    "int4": (*FLOAT32, 4),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate in one direction.

    Attributes:
        agreement: Estimate and exact KL at the exact positions.
        plain: Mean there of the form without the added terms.
        negative: Rows of the whole trace with a negative estimate or lower bound.
    """

    run: str
    direction: str
    agreement: Agreement
    plain: float
    negative: int


def main() -> None:
    """Make the runs, print the tables."""
    options = parse()
    audit = make_audit(options.directory, options)
    print("\n".join(tables(measure(audit))))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-threads", type=int, default=1)
    return parser.parse_args()


def make_audit(directory: Path, options: argparse.Namespace) -> Path:
    """Record, and replay every candidate, by the tool's own commands."""
    from trace_audit.run_setup import find_model

    directory.mkdir(parents=True, exist_ok=True)
    audit = directory / "audit"
    settings = ["--set", f"device={options.device}", "--set", f"num_threads={options.num_threads}"]
    if not audit.exists():
        command("record", options.model, "--prompts", PROMPTS, "-o", audit, "--ignore-eos",
                "--max-tokens", options.max_tokens, "--exact-positions", options.positions,
                *settings)  # fmt: skip
    there = AuditDir.open(audit).run_names()
    config = directory / "float32.toml"
    config.write_text('name = "float32"\n[engine]\ndtype = "float32"\n')
    for name, (dtype, backend, bits) in CANDIDATES.items():
        if name in there:
            continue
        model: list[object] = []
        if bits is not None:
            model = ["--model", directory / name]
            save_rounded(find_model(options.model).directory, directory / name, bits)
        command("replay", audit, "--config", config, "--name", name, *model, *settings,
                "--set", f"dtype={dtype}", "--set", f"attention_backend={backend}")  # fmt: skip
    for name in BROKEN.keys() - set(there):
        replay_broken(audit, name, options.device, options.num_threads)
    return audit


def save_rounded(source: Path, target: Path, bits: int) -> Path:
    """A checkpoint with the linear weights rounded to so many bits, float32; embeddings stay.

    Symmetric, one scale an output channel: the largest weight of a row becomes 2^(bits - 1) - 1.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
            continue
        weights = {}
        for name, weight in load_file(path).items():
            weights[name] = weight.float()
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                largest = 2 ** (bits - 1) - 1
                scale = weights[name].abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
                weights[name] = torch.round(weights[name] / scale) * scale
        save_file(weights, target / path.name, metadata={"format": "pt"})
    return target


def replay_broken(audit: Path, name: str, device: str, num_threads: int) -> None:
    """A float32 replay on another backend whose logits are broken at 1 % of the positions."""
    from trace_audit.audit import execute
    from trace_audit.config import default_record_config, override
    from trace_audit.jobs import ReplayJob

    changes = {
        "engine.attention_backend": "sdpa",
        "engine.device": device,
        "engine.num_threads": num_threads,
    }
    job = ReplayJob(
        audit=audit,
        config=override(default_record_config(), changes),
        run_name=name,
        model=None,
        model_path=None,
        only=(),
        repeat_of=None,
        force=False,
    )
    with sparse_fault(BROKEN[name]):
        execute(job, lambda event: None)


@contextmanager
def sparse_fault(std: float) -> Iterator[None]:
    """Within it every engine of this process adds noise to all logits of some positions."""
    import torch

    from trace_audit.engine.batch import Batch
    from trace_audit.engine.model_runner import ModelRunner

    forward = ModelRunner._forward

    def broken(runner: ModelRunner, batch: Batch, input_ids: torch.Tensor) -> torch.Tensor | None:
        logits = forward(runner, batch, input_ids)
        assert logits is not None
        for index, row in enumerate(batch.rows):
            if not row.is_uncommitted:
                continue
            generator = np.random.default_rng([row.request.index, row.step])
            if generator.random() < BROKEN_SHARE:
                noise = generator.normal(0, std, logits.shape[1]).astype(np.float32)
                logits[index] += torch.from_numpy(noise).to(logits)
        return logits

    ModelRunner._forward = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelRunner._forward = forward  # type: ignore[method-assign]


def measure(audit: Path) -> Iterator[Row]:
    """Both directions of every candidate, as `diff report` compares them."""
    source = AuditSource(AuditDir.open(audit))
    names = [name for name in (*CANDIDATES, *BROKEN) if name in source.audit.run_names()]
    for name in names:
        comparison = compare(source, RECORD, name)
        pair, check = comparison.pair, comparison.summary.exact_check
        sample = pair.exact
        assert check is not None
        assert sample is not None
        assert sample.record is not None
        a, b, record = (s.support for s in (sample.baseline, sample.candidate, sample.record))
        assert a is not None
        assert b is not None
        assert record is not None
        sides = {f"record || {name}": (check.forward, a, b)}
        sides[f"{name} || record"] = (check.reverse, b, a)
        negative = negative_rows(pair)
        for (direction, (agreement, x, y)), count in zip(sides.items(), negative, strict=True):
            assert agreement is not None
            yield Row(
                run=name,
                direction=direction,
                agreement=agreement,
                plain=float(plain_form(x, y, record).mean()),
                negative=count,
            )


def negative_rows(pair: PairRows) -> tuple[int, int]:
    """Rows of the whole pair with an estimate or a bound under zero, in both directions."""
    counts = [0, 0]
    for batch in aligned_batches(pair):
        sides = [fixed_support(run) for run in (batch.baseline, batch.candidate, batch.record)]
        a, b, record = sides
        assert a is not None
        assert b is not None
        assert record is not None
        for i, (x, y) in enumerate(((a, b), (b, a))):
            terms = fixed_support_kl(x, y, record, batch.support_token_ids)
            below = (terms.estimate < 0) | (terms.lower_bound < 0)
            counts[i] += int(below[terms.usable].sum())
    return counts[0], counts[1]


def plain_form(x: FixedSupport, y: FixedSupport, record: FixedSupport) -> NDArray[np.float64]:
    """Sum of x ln(x/y) at the support, without the terms that `diff/kl.py` adds: float64 [N].

    Its expectation is the same; its terms have both signs and cancel.
    """
    terms = np.exp(x.logprobs) * (x.logprobs - y.logprobs)
    weight = np.exp(record.log_tail[:, None] - record.logprobs)
    tail = (terms * weight)[:, SUPPORT_TOP_K:].mean(axis=1)
    total: NDArray[np.float64] = terms[:, :SUPPORT_TOP_K].sum(axis=1) + tail
    return total


def tables(rows: Iterator[Row]) -> Iterator[str]:
    """Markdown."""
    titles = ("KL", "positions", "exact", "estimate", "ratio", "difference / its standard error",
              "standard error / exact", "lower bound / exact", "plain form / exact",
              "negative rows")  # fmt: skip
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        found = row.agreement
        error = found.standard_error
        assert error is not None
        cells = (
            row.direction.replace("||", "\\|\\|"),
            f"{found.positions:,}",
            f"{found.exact:.4g}",
            f"{found.estimate:.4g}",
            f"{found.estimate / found.exact:.4f}",
            f"{found.difference / error:+.2f}",
            f"{error / found.exact:.2%}",
            f"{found.lower_bound / found.exact:.3f}",
            f"{row.plain / found.exact:.4g}",
            f"{row.negative}",
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
