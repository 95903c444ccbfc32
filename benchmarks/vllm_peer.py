"""vLLM in a process of its own, told by a line of JSON when to decode.

It imports nothing of this repository, so that it can run in another environment. The first line of
its input has the model, the prompts and the options; its first answer says that it is ready, or why
it is not. Every further line is a round, answered by its seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load, then serve rounds until the input ends."""
    # vLLM and its children print; answers alone go where they are read.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    job = json.loads(sys.stdin.readline())
    try:
        import vllm
    except ModuleNotFoundError as error:
        # A module that vLLM itself lacks is another failure than no vLLM.
        said = "vllm is not installed" if error.name == "vllm" else f"vllm: {error}"
        answer({"not_run": f"{said} ({sys.executable})"})
        return
    try:
        peer = Peer(vllm, job)
        peer.seconds(job["num_tokens"])
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        answer({"not_run": f"vLLM {vllm.__version__}: {type(error).__name__}: {first}"})
        raise
    answer({"version": vllm.__version__})
    for _ in sys.stdin:
        seconds = peer.seconds(job["num_tokens"])
        prefill = peer.seconds(1)
        answer({"seconds": seconds, "prefill_seconds": prefill})


class Peer:
    """An engine and its prompts.

    Args:
        vllm: the module.
        job: model, dtype, load_format, prompts, num_tokens, longest, max_num_batched_tokens,
            gpu_memory_utilization, logprobs.
    """

    def __init__(self, vllm: Any, job: dict[str, Any]) -> None:
        self._vllm = vllm
        self._job = job
        self._llm = vllm.LLM(
            model=job["model"],
            dtype=job["dtype"],
            load_format=job["load_format"],
            skip_tokenizer_init=True,
            max_model_len=job["longest"],
            max_num_seqs=len(job["prompts"]),
            max_num_batched_tokens=job["max_num_batched_tokens"],
            gpu_memory_utilization=job["gpu_memory_utilization"],
            # From the second round on there would be no prefill.
            enable_prefix_caching=False,
            seed=0,
        )

    def seconds(self, num_tokens: int) -> float:
        """Time to decode so many tokens in every row, greedily.

        Raises:
            RuntimeError: a row came out shorter.
        """
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=self._job["logprobs"],
        )
        prompts = [{"prompt_token_ids": ids} for ids in self._job["prompts"]]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {num_tokens}:
            raise RuntimeError(f"vLLM gave {sorted(lengths)} tokens in its rows of {num_tokens}")
        return seconds


if __name__ == "__main__":
    main()
