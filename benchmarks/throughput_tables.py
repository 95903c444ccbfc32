"""What `throughput` measured, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.measure import Spread
from benchmarks.rounds import Entry, Rounds, ratio
from benchmarks.throughput import label
from benchmarks.throughput_sides import Bench
from trace_audit.config import flat

GB = 1e9


def tables(bench: Bench, rounds: Rounds) -> Iterator[str]:
    """Markdown: what ran where, a row a side, and what was measured beside them."""
    yield title(bench)
    yield ""
    yield "| side | tokens/s | replay's speed over its | decode step, ms | step / floor |"
    yield "|---|---|---|---|---|"
    for entry in rounds.entries:
        if entry.not_run is not None:
            yield f"| {label(bench.options, entry.name)} | not run: {entry.not_run} | | | |"
            continue
        figures = row(bench, rounds, entry)
        texts = [
            _text(figures["tokens_per_second"], 1),
            _text(figures["replay_speedup"], 2),
            _text(figures["step_ms"], 2),
            _text(figures["step_over_floor"], 2),
        ]
        yield f"| {label(bench.options, entry.name)} | {' | '.join(texts)} |"
    yield ""
    yield "| beside them | |"
    yield "|---|---|"
    yield from (f"| {name} | {text} |" for name, text in beside_rows(bench, rounds))


def title(bench: Bench) -> str:
    """Model, batch and machine in a line."""
    workload = bench.workload
    prompts = sorted({len(prompt) for prompt in workload.prompts})
    lengths = str(prompts[0]) if len(prompts) == 1 else f"{prompts[0]} to {prompts[-1]}"
    sets = "".join(f", `{text}`" for text in bench.options.sets)
    device = (
        torch.cuda.get_device_name()
        if bench.device.type == "cuda"
        else f"CPU, threads: {torch.get_num_threads()}"
    )
    return (
        f"{bench.model.name}, {bench.options.dtype}{sets}: {workload.rows} rows, prompts of "
        f"{lengths} tokens, {workload.num_tokens} tokens decoded, on {device}; "
        f"alternating rounds: {bench.options.rounds}; median (lowest..highest)."
    )


def row(bench: Bench, rounds: Rounds, entry: Entry) -> dict[str, Spread | None]:
    """A side's figures; each ratio is of one round's values."""
    name, total = entry.name, bench.workload.total
    return {
        "tokens_per_second": rounds.over(lambda r: ratio(total, rounds.seconds(name, r))),
        "replay_speedup": rounds.over(
            lambda r: ratio(rounds.seconds(name, r), rounds.seconds("replay", r))
        ),
        "step_ms": rounds.over(lambda r: _ms(rounds.step(name, r))),
        "step_over_floor": rounds.over(
            lambda r: ratio(rounds.step(name, r), floor_seconds(bench, rounds, r))
        ),
    }


def floor_seconds(bench: Bench, rounds: Rounds, number: int) -> float | None:
    """Bytes that a step reads over the bandwidth of that round."""
    weights = bench.weight_bytes
    if weights is None:
        return None
    return (weights + bench.kv_bytes) / rounds.beside["bandwidth"][number]


def beside_figures(bench: Bench, rounds: Rounds) -> dict[str, Spread | None]:
    """What is no side's, round by round."""
    beside = rounds.beside
    figures = {
        "bandwidth_gb_per_second": rounds.over(lambda r: beside["bandwidth"][r] / GB),
        "floor_ms": rounds.over(lambda r: _ms(floor_seconds(bench, rounds, r))),
        "overhead_ms": rounds.over(
            lambda r: _difference(_ms(rounds.step("replay", r)), _ms(rounds.step("plain", r)))
        ),
        "overhead_ratio": rounds.over(
            lambda r: ratio(rounds.step("replay", r), rounds.step("plain", r))
        ),
    }
    for name in ("linear_torch", "linear_packed"):
        if name in beside:
            values = beside[name]
            figures[f"{name}_ms"] = rounds.over(lambda r, v=values: _ms(v[r]))  # type: ignore[misc]
            figures[f"{name}_share_of_replay_step"] = rounds.over(
                lambda r, v=values: ratio(v[r], rounds.step("replay", r))  # type: ignore[misc]
            )
    return figures


def beside_rows(bench: Bench, rounds: Rounds) -> Iterator[tuple[str, str]]:
    """Name and text of what is no side's."""
    figures = beside_figures(bench, rounds)
    yield "copy on the device, GB/s read and written", _text(figures["bandwidth_gb_per_second"], 1)
    weights = bench.weight_bytes
    if weights is None:
        yield "floor of a step", "none: quantized weights or experts are not all read as they are"
    else:
        what = f"{weights / GB:.3f} GB of weights, {bench.kv_bytes / GB:.3f} GB of KV"
        yield f"floor of a step, ms: {what}", _text(figures["floor_ms"], 2)
    yield (
        "replay's own part of its step, ms (replay - likeliest token alone)",
        f"{_text(figures['overhead_ms'], 2)}; ratio {_text(figures['overhead_ratio'], 3)}",
    )
    for name, what in (("linear_torch", "torch"), ("linear_packed", "packed, as in the engine")):
        if f"{name}_ms" in figures:
            share = _text(figures[f"{name}_share_of_replay_step"], 2)
            text = f"{_text(figures[f'{name}_ms'], 2)}; of replay's step {share}"
            yield f"linear layers of a step alone, {what}, ms", text
    if bench.memory is not None:
        memory = bench.memory
        both = f"{memory.weights / GB:.2f} GB of weights and {memory.kv_cache / GB:.2f} GB of cache"
        working = f"{memory.working / GB:.2f} GB, {memory.share:.1%} of both"
        yield f"memory of a replay's peak, beside {both}", working
    yield from _loading(bench)


def _loading(bench: Bench) -> Iterator[tuple[str, str]]:
    loading = bench.model.loading
    if "file_bytes" not in loading:
        made = loading["made_in_memory_seconds"]
        yield "random weights, made in memory", f"{made:.1f} s; no file is loaded"
        return
    size = loading["file_bytes"]
    yield (
        f"plain read of the weights, {size / GB:.2f} GB",
        f"{loading['plain_read_bytes_per_second'] / GB:.2f} GB/s",
    )
    for side in ("engine", "transformers"):
        seconds = loading[f"{side}_seconds"]
        yield f"loading, {side}", f"{seconds:.1f} s, {size / GB / seconds:.2f} GB/s"


def as_json(bench: Bench, rounds: Rounds) -> dict[str, Any]:
    """Everything that was measured, with what it depends on."""
    peer = rounds.entry("vllm")
    version = None if peer is None else getattr(peer.side, "version", None)
    return {
        "environment": machine(bench.config) | {"vllm": version},
        "model": {
            "name": bench.model.name,
            "weight_bytes_read": bench.weight_bytes,
            "kv_bytes_read": bench.kv_bytes,
            "loading": bench.model.loading,
        },
        "workload": {
            "rows": bench.workload.rows,
            "tokens": bench.workload.num_tokens,
            "prompt_tokens": [len(prompt) for prompt in bench.workload.prompts],
        },
        "engine": {"config": flat(bench.config), "backends": bench.backends},
        "rounds": rounds.count,
        "sides": [_side(bench, rounds, entry) for entry in rounds.entries],
        "memory_bytes": None if bench.memory is None else asdict(bench.memory),
        "beside": _json(beside_figures(bench, rounds)),
    }


def _side(bench: Bench, rounds: Rounds, entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "label": label(bench.options, entry.name),
        "not_run": entry.not_run,
        "error": entry.error,
        "seconds": {str(number): t.seconds for number, t in sorted(entry.timings.items())},
        **_json(row(bench, rounds, entry)),
    }


def _json(figures: dict[str, Spread | None]) -> dict[str, Any]:
    return {name: None if f is None else f.to_json() for name, f in figures.items()}


def _text(figure: Spread | None, digits: int) -> str:
    return "n/a" if figure is None else figure.text(digits)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second
