"""Tokens per second of a replay against transformers' `generate`, in one process.

Usage: python -m benchmarks.replay_vs_generate [--model DIR|demo] [--sequences 32] [--tokens 128]
       [--dtype bfloat16] [--device cpu] [--rounds 3]

Rounds alternate: generate, replay, generate, replay. Both decode the same prompts to the same
number of tokens at the same batch; the replay also computes every statistic it stores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument("--sequences", type=int, default=32)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cpu")
parser.add_argument("--attention-backend", default="auto")
parser.add_argument("--rounds", type=int, default=3)
arguments = parser.parse_args()
if arguments.device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # as the runner does, before triton is imported

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from trace_audit.config import EngineConfig, Hardware, RunConfig, resolve  # noqa: E402
from trace_audit.engine.build import build_engine  # noqa: E402
from trace_audit.engine.sampling_params import SamplingParams  # noqa: E402
from trace_audit.models.demo import demo_model  # noqa: E402
from trace_audit.models.loader import load_model, torch_dtype  # noqa: E402
from trace_audit.storage.fingerprint import cache_dir  # noqa: E402

TOPICS = ["the sea", "prime numbers", "a lost key", "sorting a list", "winter", "bread", "Mars"]
QUESTIONS = [
    "Write a short story about {}.",
    "Explain {} to a child in three sentences.",
    "What do most people get wrong about {}? Give an example and say why it matters.",
    "List five facts about {}.",
    "Describe {} as a travel guide would, with one warning and one piece of advice at the end.",
]


def prompts(tokenizer, count: int) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """`count` chat prompts of several lengths."""
    texts = [QUESTIONS[i % len(QUESTIONS)].format(TOPICS[i % len(TOPICS)]) for i in range(count)]
    return [tokenizer(text)["input_ids"] for text in texts]


def main() -> None:
    """Run the rounds and print a table."""
    torch.set_num_threads(os.cpu_count() or 1)
    directory = demo_model(cache_dir()) if arguments.model == "demo" else Path(arguments.model)
    dtype, device = torch_dtype(arguments.dtype), torch.device(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = prompts(tokenizer, arguments.sequences)
    config = RunConfig(
        name="benchmark",
        engine=EngineConfig(
            device=arguments.device,
            dtype=arguments.dtype,
            attention_backend=arguments.attention_backend,
            max_num_seqs=arguments.sequences,
        ),
    )
    hardware = Hardware(
        cuda_available=torch.cuda.is_available(),
        cuda_device_name=None,
        cpu_count=os.cpu_count() or 1,
    )
    longest = max(map(len, ids)) + arguments.tokens
    config = resolve(config, hardware=hardware, max_sequence_len=longest)
    loaded = load_model(directory, dtype=dtype, device=device, lm_head_dtype=dtype)
    built = build_engine(loaded, config.engine)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    tokenizer.padding_side = "left"
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device)

    def generate() -> None:
        model.generate(
            **padded,
            max_new_tokens=arguments.tokens,
            min_new_tokens=arguments.tokens,
            do_sample=False,
        )

    def requests(traces, supports):  # type: ignore[no-untyped-def]
        return [
            built.input_processor.process(
                str(i),
                prompt,
                SamplingParams(
                    max_tokens=arguments.tokens,
                    ignore_eos=True,
                    trace_decode_token_ids=None if traces is None else traces[i],
                ),
                index=i,
                support_token_ids=None if supports is None else supports[i],
            )
            for i, prompt in enumerate(ids)
        ]

    recorded = built.engine.run(requests(None, None))
    traces = [o.token_ids.tolist() for o in recorded]
    supports = [o.support_token_ids for o in recorded]
    generate()
    total = arguments.sequences * arguments.tokens
    rates: dict[str, list[float]] = {"generate": [], "replay": []}
    for _ in range(arguments.rounds):
        for name, run in (
            ("generate", generate),
            ("replay", lambda: built.engine.run(requests(traces, supports))),
        ):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            rates[name].append(total / (time.perf_counter() - start))
    print(f"{directory.name} {arguments.dtype} on {device}, {built.backends}")
    print(f"{arguments.sequences} sequences x {arguments.tokens} tokens, torch {torch.__version__}")
    for name, values in rates.items():
        low, high = min(values), max(values)
        print(f"{name:9} {statistics.median(values):8.1f} tokens/s  ({low:.1f} to {high:.1f})")
    ratios = [r / g for r, g in zip(rates["replay"], rates["generate"], strict=True)]
    print(f"replay / generate, round by round: {', '.join(f'{r:.2f}' for r in ratios)}")


if __name__ == "__main__":
    sys.exit(main())
