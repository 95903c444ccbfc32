"""transformers' own ways to decode, as sides of a benchmark."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.measure import Stamps, Timing, step_seconds, synchronize
from benchmarks.workload import Workload

_PAGE = 256  # tokens; transformers' default
_LARGEST_LAUNCH = 8192  # tokens; transformers' default


def without_defaults(model: Any) -> Any:
    """A model whose own generation config ends no sequence and changes no logits."""
    model.generation_config = GenerationConfig()
    return model


class NotRun(Exception):
    """A side cannot run here; the message says why."""


class Generate:
    """`generate`, padded on the left.

    Args:
        name: of the row.
        model: with sdpa attention.
        workload: what to decode.
        cache: `cache_implementation`: "dynamic", or "static", which compiles the forward on CUDA.
        logprobs: whether every step takes the logprob and the rank of its tokens from its scores.
    """

    def __init__(
        self, name: str, model: Any, workload: Workload, cache: str, *, logprobs: bool = False
    ) -> None:
        self.name = name
        self._model = model
        self._workload = workload
        self._cache = cache
        self._logprobs = logprobs

    def start(self) -> None:
        """Warm up; a static cache compiles and captures here.

        Raises:
            NotRun: a static cache away from CUDA.
        """
        if self._cache == "static" and self._model.device.type != "cuda":
            raise NotRun("transformers compiles the forward of a static cache on CUDA alone")
        self.run()
        if self._cache == "static":
            self.run()  # the graph is captured in a second one

    def run(self) -> Timing:
        """Decode every row once."""
        workload, device = self._workload, self._model.device
        stamps = _StampCriteria(device, logprobs=self._logprobs)
        synchronize(device)
        start = time.perf_counter()
        result = self._model.generate(
            **_padded(workload, device),
            generation_config=_greedy(
                workload,
                cache_implementation=self._cache,
                return_dict_in_generate=True,
                output_scores=self._logprobs,
            ),
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
        stamps.to_host()
        synchronize(device)
        seconds = time.perf_counter() - start
        decoded = result.sequences.shape[1] - workload.longest_prompt
        if decoded != workload.num_tokens:
            raise RuntimeError(f"generate gave {decoded} tokens of {workload.num_tokens}")
        marks = stamps.stamps.seconds()
        step = step_seconds(marks, [workload.rows] * len(marks), workload.rows)
        return Timing(seconds=seconds, step_seconds=step)

    def close(self) -> None:
        """Nothing outlives a run."""


class _StampCriteria(StoppingCriteria):
    """Stops nothing, notes when each step ends, and takes its statistics where they are wanted.

    Attributes:
        rows: of each step, [B, 2]: logprob and rank of each row's token.
    """

    def __init__(self, device: torch.device, *, logprobs: bool) -> None:
        self.stamps = Stamps(device)
        self.rows: list[torch.Tensor] = []
        self._logprobs = logprobs

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """No row is done."""
        if self._logprobs:
            logits, tokens = scores[-1], input_ids[:, -1:]
            chosen = logits.gather(-1, tokens)
            logprob = logits.log_softmax(-1).gather(-1, tokens)
            rank = 1 + (logits > chosen).sum(-1, keepdim=True)
            self.rows.append(torch.cat([logprob, rank], dim=-1))
        self.stamps.mark()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def to_host(self) -> None:
        """Bring the statistics to the host."""
        self.rows = [rows.cpu() for rows in self.rows]


class GenerateBatch:
    """`generate_batch`: continuous batching over a paged cache, with sdpa.

    Prefix sharing is off: from the second round on there would be no prefill. The manager with its
    cache is kept from round to round.

    Args:
        name: of the row.
        model: with sdpa attention.
        workload: what to decode.
        logprobs: whether it returns the logprob of every token; it has no ranks.
    """

    def __init__(
        self, name: str, model: Any, workload: Workload, *, logprobs: bool = False
    ) -> None:
        self.name = name
        self._model = model
        self._workload = workload
        # Every round warns that a kept manager fits its first workload; there is no other. What it
        # logs as an error is shown.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        # Until 5.17 the paged form had a name of its own; since then one says not to take flash.
        self._attention = "sdpa" if "auto_switch_to_flash" in names else "paged|sdpa"
        options = {"auto_switch_to_flash": False} if self._attention == "sdpa" else {}
        pages = workload.rows * (-(-workload.longest // _PAGE) + 1)
        self._config = ContinuousBatchingConfig(
            num_blocks=pages + pages // 2,  # room for the share that the scheduler holds back
            max_batch_tokens=min(_LARGEST_LAUNCH, workload.rows * workload.longest),
            allow_block_sharing=False,
            return_logprobs=logprobs,
            **options,
        )

    def start(self) -> None:
        """Make the manager and its cache, and decode once."""
        self.run()

    def run(self) -> Timing:
        """Decode every row once.

        Raises:
            RuntimeError: a row failed; transformers itself only logs that.
        """
        workload, device = self._workload, self._model.device
        self._model.set_attn_implementation(self._attention)
        try:
            synchronize(device)
            start = time.perf_counter()
            results = self._model.generate_batch(
                [list(prompt) for prompt in workload.prompts],
                generation_config=_greedy(workload, eos_token_id=-1),
                continuous_batching_config=self._config,
                record_timestamps=True,
                persistent_manager=True,
                max_new_tokens=workload.num_tokens,
            )
        finally:
            self._model.set_attn_implementation("sdpa")
        self._check(results)
        stamps = [result.timestamps for result in results.values()]
        # Until the last token was there: stopping the manager's thread afterwards takes a while.
        seconds = max(marks[-1] for marks in stamps) - start
        return Timing(seconds=seconds, step_seconds=_step_of(stamps))

    def close(self) -> None:
        """Free the cache."""
        self._model.destroy_cached_continuous_batching_manager()

    def _check(self, results: dict[str, Any]) -> None:
        errors = [result.error for result in results.values() if result.error is not None]
        if errors:
            raise RuntimeError(str(errors[0]))
        done = sum(len(result.generated_tokens) for result in results.values())
        if done != self._workload.total:
            raise RuntimeError(
                f"generate_batch gave {done} tokens of {self._workload.total}; its log says why"
            )
        if self._config.return_logprobs:
            told = sum(len(result.logprobs) for result in results.values())
            if told != done:
                raise RuntimeError(f"generate_batch gave {told} logprobs of {done} tokens")


def _step_of(stamps: list[list[float]]) -> float | None:
    """Time of a step while every row decodes, from when each row's tokens were there."""
    last_to_start = max(stamps, key=lambda marks: marks[0])
    first_end = min(marks[-1] for marks in stamps)
    full = [mark for mark in last_to_start if mark <= first_end]
    return (full[-1] - full[0]) / (len(full) - 1) if len(full) > 1 else None


def _greedy(workload: Workload, **options: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=workload.num_tokens, do_sample=False, pad_token_id=0, **options
    )


def _padded(workload: Workload, device: torch.device) -> dict[str, torch.Tensor]:
    longest = workload.longest_prompt
    ids = torch.zeros(workload.rows, longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(workload.prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
