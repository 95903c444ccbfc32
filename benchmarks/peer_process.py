"""The other end of `vllm_peer`: its process as a side of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Timing
from benchmarks.transformers_side import NotRun
from benchmarks.workload import Workload

_SCRIPT = Path(__file__).with_name("vllm_peer.py")


class PeerSide:
    """vLLM in a process of its own, in rounds with the others.

    It holds its weights and its cache while the others run, and computes nothing then.

    Args:
        name: of the row.
        job: what `vllm_peer.Peer` takes, without prompts and lengths.
        workload: what to decode.
        python: interpreter that has vLLM; None: this one.
    """

    def __init__(
        self, name: str, job: dict[str, Any], workload: Workload, python: str | None = None
    ) -> None:
        self.name = name
        self.version: str | None = None
        self._job = job | {
            "prompts": workload.prompts,
            "num_tokens": workload.num_tokens,
            "longest": workload.longest,
        }
        self._num_tokens = workload.num_tokens
        self._python = python or sys.executable
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process, load, decode once.

        Raises:
            NotRun: vLLM is not there or cannot run this; its own words are on stderr.
        """
        self._process = subprocess.Popen(
            [self._python, str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        answer = self._ask(json.dumps(self._job))
        if "not_run" in answer:
            raise NotRun(answer["not_run"])
        self.version = answer["version"]

    def run(self) -> Timing:
        """Decode every row once; then only its first token, for the time of a step."""
        answer = self._ask("round")
        decode = answer["seconds"] - answer["prefill_seconds"]
        step = decode / (self._num_tokens - 1) if self._num_tokens > 1 else None
        return Timing(seconds=answer["seconds"], step_seconds=step)

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: no answer comes, which is said below
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer's process ended with exit code {process.wait()}")
        return dict(json.loads(answer))
