"""One look at the full model: the first recorded sequence, scored by transformers itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.errors import RunFailedError
from trace_audit.models.loaded import LoadedModel

TOLERANCE = 1e-3
"""Largest accepted |delta| of a float32 logprob, nats; healthy models stay under 5e-5."""

_MOST_TOKENS = 128


def check_model(
    loaded: LoadedModel,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    logprob: npt.NDArray[np.float32],
) -> dict[str, Any]:
    """Compare recorded logprobs with transformers' own eager forward over the same weights.

    Args:
        loaded: the model that recorded.
        prompt_token_ids: of the sequence.
        output_token_ids: its first tokens are compared, as many as fit in 128 with the prompt.
        logprob: float32 [len(output_token_ids)], as recorded.

    Returns:
        For run.json: tokens and max_abs_delta_logprob, or why it was skipped.

    Raises:
        RunFailedError: they disagree.
    """
    dtype = next(loaded.model.parameters()).dtype
    if dtype != torch.float32:
        return {"skipped": f"the record run is {str(dtype).removeprefix('torch.')}, not float32"}
    if loaded.fused:
        return {"skipped": "the record run's layers are fused, not transformers' own"}
    if loaded.quantized.products is not None:
        # A last bit of an activation can move it to the neighbouring 8-bit float.
        return {"skipped": "the record run rounds activations to 8 bits"}
    count = min(len(output_token_ids), _MOST_TOKENS - len(prompt_token_ids))
    if count < 1:
        return {"skipped": f"the first prompt alone has over {_MOST_TOKENS - 1} tokens"}
    theirs = _transformers_logprobs(loaded, [*prompt_token_ids, *output_token_ids[:count]], count)
    worst = float(np.abs(theirs - logprob[:count]).max())
    if not worst <= TOLERANCE:
        raise RunFailedError(
            f"the engine's logprobs differ from transformers' own by {worst:.2g} nats on the first "
            "sequence",
            hint="this model cannot be audited; please report its architecture",
        )
    return {"tokens": count, "max_abs_delta_logprob": worst}


def _transformers_logprobs(
    loaded: LoadedModel, token_ids: Sequence[int], count: int
) -> npt.NDArray[np.float32]:
    config = loaded.model.config
    ours = config._attn_implementation  # type: ignore[union-attr]
    device = next(loaded.model.parameters()).device
    ids = torch.tensor([list(token_ids)], device=device)
    config._attn_implementation = "eager"  # type: ignore[union-attr]
    try:
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            logits = loaded.model(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits[
                0, :-1
            ]
    finally:
        config._attn_implementation = ours  # type: ignore[union-attr]
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, ids[0, -count:, None])[:, 0]
    return logprobs.cpu().numpy()
