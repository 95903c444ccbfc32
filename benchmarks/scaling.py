"""How a replay's decode step grows with rows, context and model, beside the floor of its bytes.

Three sweeps, each of one size with the other two held: rows, tokens of context, and shapes of
random weights. A point is a whole batch at its context that replays random traces with every
statistic; the time of a step is taken while all rows decode. Prints a Markdown table a sweep and
the straight line through it; a point that memory does not hold is a row that says so.

    python -m benchmarks.scaling --device cuda --json scaling.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.fit import fitted
from benchmarks.measure import progress
from benchmarks.shapes import SHAPES
from benchmarks.throughput import add_model_options, decide, write_json
from trace_audit.errors import TraceAuditError

if TYPE_CHECKING:
    from benchmarks.scaling_points import Point

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 2048, 8192, 32768)
# Sweep -> unit of its line's slope, and how many of its sizes that unit is.
SWEEPS = {
    "rows": ("ms a row", 1),
    "context": ("ms per 1,000 tokens of context", 1000),
    "weights": ("ms per GB of weights", 1),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every point, print the tables and the lines."""
    options = parse(arguments)
    decide(options)
    from benchmarks.scaling_points import measured

    try:
        points, environment = measured(options)
    except TraceAuditError as error:
        progress(f"{error.message}\n{error.hint or ''}".rstrip())
        return error.exit_code
    print("\n".join(tables(points)))
    if options.json:
        own = sys.argv[1:] if arguments is None else arguments
        values = {
            "command": shlex.join(["python", "-m", "benchmarks.scaling", *own]),
            "environment": environment,
            "points": [asdict(point) for point in points],
            "lines": {sweep: lines(points, sweep) for sweep in SWEEPS},
        }
        write_json(options.json, values)
    return 0


def tables(points: Sequence[Point]) -> Iterator[str]:
    """A table a sweep, each with its line."""
    for sweep, (unit, _) in SWEEPS.items():
        own = [point for point in points if point.sweep == sweep]
        if not own:
            continue
        yield "| shape | rows | context | weights, GB | KV, GB | step, ms | floor, ms | ratio |"
        yield "|---|---|---|---|---|---|---|---|"
        yield from (table_row(point) for point in own)
        for what, line in lines(points, sweep).items():
            yield ""
            if line is None:
                yield f"{what}: fewer than two sizes, so no line."
            else:
                yield (
                    f"{what}: {line['slope']:.4g} {unit}, {line['intercept']:.4g} ms at 0, "
                    f"R2 {line['r_squared']:.3f}."
                )
        yield ""


def table_row(point: Point) -> str:
    """A point as a row."""
    step, over = f"not run: {point.not_run}", ""
    if point.step_ms is not None:
        step = point.step_ms.text(2)
        over = f"{point.step_ms.median / point.floor_ms:.2f}"
    return (
        f"| {point.shape} | {point.rows} | {point.context} | {point.weight_gb:.3f} "
        f"| {point.kv_gb:.3f} | {step} | {point.floor_ms:.3f} | {over} |"
    )


def lines(points: Sequence[Point], sweep: str) -> dict[str, dict[str, float] | None]:
    """The least-squares lines of a sweep's steps (medians) and floors, over what was run."""
    there = [p for p in points if p.sweep == sweep and p.step_ms is not None]
    sizes = [point.size / SWEEPS[sweep][1] for point in there]
    heights = {
        "step": [point.step_ms.median for point in there if point.step_ms is not None],
        "floor": [point.floor_ms for point in there],
    }
    through: dict[str, Any] = {what: fitted(sizes, ms) for what, ms in heights.items()}
    return {what: None if line is None else asdict(line) for what, line in through.items()}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=[*SHAPES],
        default=["qwen3-4b", "qwen3-0.6b"],
        help="the first one has all points, the others the base point alone",
    )
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="at --base-context")
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=list(CONTEXTS), help="at --base-rows"
    )
    parser.add_argument("--base-rows", type=int, default=8)
    parser.add_argument("--base-context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32, help="decoded in every row")
    add_model_options(parser)
    options = parser.parse_args(arguments)
    sizes = [*options.rows, *options.contexts, options.base_rows, options.base_context]
    if min(sizes) < 1 or options.tokens < 3 or options.rounds < 1:
        parser.error("sizes and --rounds are 1 or more, --tokens 3 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
