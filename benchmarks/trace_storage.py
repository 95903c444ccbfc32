"""A dedicated trace matrix against reuse of the request's own row: bytes and throughput.

Usage: python -m benchmarks.trace_storage [--device cpu] [--rounds 9]

Both variants admit, overwrite and release the same requests, in alternating rounds. The claim is
that reuse is neutral in speed and saves max_num_reqs x max_model_len x 4 bytes; not that it is
faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--device", default="cpu")
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--max-num-reqs", type=int, default=256)
parser.add_argument("--max-model-len", type=int, default=40960)
parser.add_argument("--steps", type=int, default=64)
arguments = parser.parse_args()
if arguments.device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from trace_audit.engine.buffers import StagedWriteTensor  # noqa: E402
from trace_audit.engine.request import Request  # noqa: E402
from trace_audit.engine.request_state import RequestState  # noqa: E402
from trace_audit.engine.sampling_params import SamplingParams  # noqa: E402
from trace_audit.engine.trace_replay import TraceReplayState  # noqa: E402
from trace_audit.kernels.runtime import kernel_mode  # noqa: E402
from trace_audit.kernels.trace_replay import apply_trace_tokens  # noqa: E402

PROMPT = list(range(1, 65))


class DedicatedMatrix(TraceReplayState):
    """What reuse replaces: a second matrix that holds the traces."""

    def __init__(self, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        super().__init__(max_num_reqs, device)
        self.matrix = StagedWriteTensor(
            max_num_reqs, max_model_len, dtype=torch.int32, device=device
        )

    def add_request(self, request: Request) -> None:
        """See `TraceReplayState`; the trace goes into the matrix too."""
        super().add_request(request)
        self.matrix.stage_write(request.slot, request.prompt_len, request.trace or [])

    def apply_staged_writes(self) -> None:
        """See `TraceReplayState`."""
        super().apply_staged_writes()
        self.matrix.apply_writes()

    def apply_trace(self, sampled, idx_mapping, state):  # type: ignore[no-untyped-def]
        """See `TraceReplayState`; reads the matrix instead of the request rows."""
        apply_trace_tokens(
            sampled,
            idx_mapping,
            self.matrix.gpu,
            self.trace_len.gpu,
            state.total_len.gpu.view(-1),
            state.prompt_len.gpu,
        )


def one_round(replay: TraceReplayState, state: RequestState, device: torch.device) -> float:
    """Seconds to admit a full batch, decode its traces and release it."""
    requests = [
        Request(
            request_id=str(i),
            index=i,
            prompt_token_ids=PROMPT,
            params=SamplingParams(trace_decode_token_ids=[i] * arguments.steps),
        )
        for i in range(arguments.max_num_reqs)
    ]
    start = time.perf_counter()
    for request in requests:
        state.add_request(request)
        replay.add_request(request)
    state.apply_staged_writes()
    replay.apply_staged_writes()
    slots = torch.tensor([r.slot for r in requests], dtype=torch.int32, device=device)
    sampled = torch.zeros(len(requests), dtype=torch.int64, device=device)
    offsets = torch.zeros_like(sampled)
    for _ in range(arguments.steps):
        replay.apply_trace(sampled, slots, state)
        state.append_tokens(slots.long(), offsets, sampled)
    assert sampled.tolist() == [r.index for r in requests]
    for request in requests:
        replay.remove_request(request)
        state.remove_request(request)
    return time.perf_counter() - start


def main() -> None:
    """Run the rounds and print the ratio and the bytes."""
    device = torch.device(arguments.device)
    sizes = (arguments.max_num_reqs, arguments.max_model_len)
    state = RequestState(*sizes, device)
    variants = {
        "dedicated": DedicatedMatrix(*sizes, device),
        "reuse": TraceReplayState(sizes[0], device),
    }
    for replay in variants.values():
        one_round(replay, state, device)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name, replay in variants.items():
            seconds[name].append(one_round(replay, state, device))
    tokens = arguments.max_num_reqs * arguments.steps
    print(f"{device}, kernels {kernel_mode(device)}, torch {torch.__version__}, {sizes}")
    for name, values in seconds.items():
        rates = [tokens / s for s in values]
        print(f"{name:10} {statistics.median(rates):12.0f} tokens/s overwritten")
    ratios = [d / r for d, r in zip(seconds["dedicated"], seconds["reuse"], strict=True)]
    print(
        f"speed of reuse / dedicated: median {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )
    matrix = variants["dedicated"].matrix.gpu  # type: ignore[attr-defined]
    print(f"bytes of the dedicated matrix: {matrix.untyped_storage().nbytes():,}")
    print(f"bytes of the lengths, which both keep: {variants['reuse'].trace_len.nbytes:,}")


if __name__ == "__main__":
    main()
