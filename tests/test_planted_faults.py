"""A fault planted in one layer's KV cache fails the gate that the healthy change passes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.planted import replay_with_lost_writes
from trace_audit.cli.main import run
from trace_audit.config import EngineConfig, RunConfig
from trace_audit.jobs import RecordJob, ReplayJob
from trace_audit.runner import run_job
from trace_audit.selftest.prompts import PROMPTS


def config(name: str, dtype: str, backend: str) -> RunConfig:
    values: dict[str, Any] = {"dtype": dtype, "attention_backend": backend}
    return RunConfig(name=name, engine=EngineConfig(device="cpu", num_threads=1, **values))


def record_job(audit: Path, model: str, max_tokens: int) -> RecordJob:
    prompts = audit.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return RecordJob(
        model=model,
        prompts_path=prompts,
        output=audit,
        config=config("record", "float32", "eager"),
        max_tokens=max_tokens,
        temperature=0.0,
        seed=0,
        ignore_eos=True,
        stop_token_ids=(),
        stop_strings=(),
        exact_positions=0,
        force=False,
    )


def replay_job(audit: Path, name: str, backend: str) -> ReplayJob:
    return ReplayJob(
        audit=audit,
        config=config(name, "bfloat16", backend),
        run_name=name,
        model=None,
        model_path=None,
        only=(),
        repeat_of=None,
        force=False,
    )


def verdict(audit: Path, candidate: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Exit code of `diff report --profile kernel` against bf16 eager, and kl.excess's gate."""
    capsys.readouterr()
    code = run(
        ["diff", "report", str(audit), "--baseline", "eager", "--candidate", candidate,
         "--profile", "kernel", "--format", "json"]
    )  # fmt: skip
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    return code, pair["verdict"]["results"][0]


@pytest.fixture(scope="module")
def tiny_audit(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A float32 record of the tiny model, bf16 eager, bf16 sdpa, and that with a fault."""
    from trace_audit.audit import execute

    audit = tmp_path_factory.mktemp("planted") / "audit"
    execute(record_job(audit, str(model), 64), _silent)
    execute(replay_job(audit, "eager", "eager"), _silent)
    execute(replay_job(audit, "sdpa", "sdpa"), _silent)
    # Prompts have 59 tokens: the fault begins in the output, and most positions are before it
    # or only touched by it through the layers above.
    replay_with_lost_writes(1, 80, replay_job(audit, "lost", "sdpa"), _silent, None)
    return audit


def _silent(event: object) -> None:
    del event


def test_a_healthy_backend_change_passes_the_kernel_profile(tiny_audit, capsys):
    code, gate = verdict(tiny_audit, "sdpa", capsys)
    assert code == 0
    assert gate["gate"]["metric"] == "kl.excess"


def test_the_same_change_with_lost_kv_writes_in_one_layer_fails_it(tiny_audit, capsys):
    code, gate = verdict(tiny_audit, "lost", capsys)
    assert code == 1
    assert gate["outcome"] == "fail"
    assert gate["interval"]["low"] > gate["threshold"]


def test_lost_writes_change_nothing_before_they_are_read(tiny_audit, capsys):
    run(["diff", "report", str(tiny_audit), "--baseline", "sdpa", "--candidate", "lost",
         "--format", "json"])  # fmt: skip
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    # The launch that computes position 80 still sees it; the next gives the token at 82.
    assert pair["first_difference"]["position"] == 82
    assert pair["structure"]["onset"]["position"] == 82


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_model_passes_healthy_and_fails_with_the_fault(tmp_path, capsys):
    """As above on the demo model, every run in a process of its own."""
    audit = tmp_path / "audit"
    run_job(record_job(audit, "demo", 64), _silent)
    run_job(replay_job(audit, "eager", "eager"), _silent)
    run_job(replay_job(audit, "sdpa", "sdpa"), _silent)
    lost = partial(replay_with_lost_writes, 12, 32)
    run_job(replay_job(audit, "lost", "sdpa"), _silent, target=lost)
    code, gate = verdict(audit, "sdpa", capsys)
    assert code == 0, gate
    code, gate = verdict(audit, "lost", capsys)
    assert code == 1, gate
