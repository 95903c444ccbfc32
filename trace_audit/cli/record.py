"""`trace-audit record`: make an audit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trace_audit.errors import ConfigError, InputError, UsageError

if TYPE_CHECKING:
    from trace_audit.config import RunConfig
    from trace_audit.storage.prompts import PromptEntry


def _temperature(context: click.Context, parameter: click.Parameter, value: float) -> float:
    from trace_audit.config import MIN_TEMPERATURE

    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    if 0 < value < MIN_TEMPERATURE:
        raise click.BadParameter(f"{value} is less than {MIN_TEMPERATURE}; 0 is greedy")
    return value


def _not_empty(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    if "" in values:
        raise click.BadParameter("an empty text would end every sequence at once")
    return values


@click.command()
@click.argument("model")
@click.option(
    "--prompts",
    "prompts_path",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSONL, one prompt a line: prompt, messages or prompt_token_ids.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The audit directory to make.",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    metavar="TOML",
    help="Configuration of the reference run.  [default: float32, eager attention]",
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a configuration key."
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    metavar="N",
    help="The most tokens generated for a prompt.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    callback=_temperature,
    default=0.0,
    show_default=True,
    metavar="T",
    help="0 is greedy.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="Of sampling and of the recorded tail draws.",
)
@click.option("--ignore-eos", is_flag=True, help="Generate past the end-of-sequence token.")
@click.option(
    "--stop-token-id",
    "stop_token_ids",
    multiple=True,
    type=click.IntRange(0, 2**31 - 1),
    metavar="ID",
    help="A token that ends a sequence; repeatable.",
)
@click.option(
    "--stop",
    "stop_strings",
    multiple=True,
    callback=_not_empty,
    metavar="TEXT",
    help="A text that ends a sequence; repeatable.",
)
@click.option(
    "--exact-positions",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Keep whole distributions at N seeded positions; replays then tell exact KL there.",
)
@click.option("--force", is_flag=True, help="Replace an audit that is already there.")
@click.pass_context
def record(
    context: click.Context,
    model: str,
    prompts_path: Path,
    output: Path,
    config_path: Path | None,
    sets: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    seed: int,
    ignore_eos: bool,
    stop_token_ids: tuple[int, ...],
    stop_strings: tuple[str, ...],
    exact_positions: int,
    force: bool,
) -> int:
    """Record a token trace and its reference logprobs.

    MODEL is a Hugging Face model directory, a hub id, or `demo`. Prints one line when finished:
    run, sequences, tokens, tokens/s and path, split by tabs.
    """
    from trace_audit.cli.execute import execute_all
    from trace_audit.cli.ranks import RunJob, as_rank
    from trace_audit.jobs import RecordJob
    from trace_audit.storage.prompts import read_prompts

    def work(run: RunJob) -> int:
        config = _config(config_path, sets)
        # The run reads them again; a mistake is told before torch loads.
        _check_path(config, prompts_path, read_prompts(prompts_path))
        job = RecordJob(
            model=model,
            prompts_path=prompts_path,
            output=output,
            config=config,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            stop_strings=stop_strings,
            exact_positions=exact_positions,
            force=force,
        )
        debug = context.find_root().params["debug"]
        return execute_all([job], keep_going=False, debug=debug, run=run)

    return as_rank(work)


def _check_path(config: RunConfig, prompts_path: Path, entries: Sequence[PromptEntry]) -> None:
    if config.engine.path != "prefill":
        return
    for entry in entries:
        if entry.output_token_ids is None:
            raise InputError(
                f"{prompts_path}, line {entry.line_number}: there are no output_token_ids, and "
                'path = "prefill" scores tokens that are given',
                hint='record with path = "decode", which generates them, and replay with '
                'path = "prefill"',
            )


def _config(path: Path | None, sets: tuple[str, ...]) -> RunConfig:
    from trace_audit.config import default_record_config, load_config, override, parse_set

    config = default_record_config() if path is None else load_config(path)
    combinations = parse_set(sets)
    if len(combinations) > 1:
        raise UsageError(
            "record makes one run, and --set gives several values to a key",
            hint="record with one value, then replay with the others",
        )
    if "name" in combinations[0]:
        raise ConfigError("the recorded run is always called record", hint="leave out --set name")
    return override(config, combinations[0])
