"""Runs of several ranks as a user starts them: their bytes, their refusals, how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import SMALL, command, run, run_info, tokens, write_config
from tests.processes import wait_until_dead
from tests.tiny import save_tiny, save_tokenizer

PROCESS = ["--set", "parallel.backend=process"]
EMULATED = ["--set", "parallel.backend=emulated"]


def sized(tensor: int = 1, pipeline: int = 1) -> list[str]:
    return [
        "--set", f"tensor_parallel_size={tensor}", "--set", f"pipeline_parallel_size={pipeline}"
    ]  # fmt: skip


def replay(audit: Path, config: Path, name: str, *options: str) -> bytes:
    run("replay", audit, "--config", config, "--name", name, *options)
    return tokens(audit, name).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processes_emulated_ranks_and_stages_write_the_same_bytes(audit, tmp_path, dtype):
    config = write_config(tmp_path / "c.toml", "c", dtype=dtype, attention_backend="eager")
    one = replay(audit, config, "one")
    two = replay(audit, config, "two", *sized(2), *PROCESS)
    assert replay(audit, config, "alike", *sized(2), *EMULATED) == two
    assert replay(audit, config, "stages", *sized(1, 2), *PROCESS) == one
    assert two != one
    ranks = run_info(audit, "two")["ranks"]
    assert (ranks["world_size"], ranks["transport"]) == (2, "gloo")
    assert [report["rank"] for report in ranks["reports"]] == [0, 1]
    assert all(report["peak_host_bytes"] > 2**26 for report in ranks["reports"])
    for baseline, candidate in (("two", "alike"), ("one", "stages")):
        report = run("diff", "report", audit, "--baseline", baseline, "--candidate", candidate)
        assert report.stdout.count("BITWISE") == 1
        assert "as it must be" in " ".join(report.stdout.split())
    drift = run("diff", "report", audit, "--baseline", "one", "--candidate", "two").stdout
    assert "FAULT" not in drift


def test_a_record_of_several_ranks_stops_at_text_and_replays_to_its_own_bytes(model, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(3)))
    audit = tmp_path / "audit"
    options = [*SMALL, *sized(2, 2), "--set", "device=cpu", *EMULATED]
    run("record", model, "--prompts", prompts, "-o", audit, "--max-tokens", 12, "--stop", "zz",
        *options)  # fmt: skip
    config = write_config(tmp_path / "c.toml", "c", attention_backend="eager")
    again = replay(audit, config, "again", *sized(2, 2), *EMULATED)
    assert again == tokens(audit, "record").read_bytes()
    skipped = run_info(audit, "record")["model_check"]["skipped"]
    assert skipped == "the model is split over ranks"


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_tiny(tmp_path_factory.mktemp("nine"), "llama-9h"))


@pytest.mark.parametrize("backend", ["process", "emulated"])
def test_nine_heads_over_two_ranks_are_refused_at_once(nine_heads, prompts, tmp_path, backend):
    done = run(
        "record", nine_heads, "--prompts", prompts, "-o", tmp_path / "audit", "--set",
        "device=cpu", *SMALL, *sized(2), "--set", f"parallel.backend={backend}", code=2,
    )  # fmt: skip
    assert "num_attention_heads = 9 cannot be split over tensor_parallel_size = 2" in done.stderr
    assert "sizes that work: 1, 3." in done.stderr
    assert not (tmp_path / "audit").exists()


def started(audit: Path, config: Path, *options: str) -> subprocess.Popen[str]:
    """A replay of two processes that has finished its first shard."""
    process = subprocess.Popen(
        command("replay", audit, "--config", config, "--name", "killed", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not list((audit / "runs").glob(".*/shard-*.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return process


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the command's ranks, in order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def assert_one_dead_rank_ends_the_run(audit: Path, config: Path, *options: str) -> None:
    process = started(audit, config, *options)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    before = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 70, err
    assert time.monotonic() - before < 30
    assert out == ""
    assert "rank 1 of 2: the run's process was killed by SIGKILL" in err
    assert wait_until_dead(ranks, seconds=0)
    assert not (audit / "runs" / "killed").exists()
    assert "killed" not in run("diff", "report", audit, code=0 if has_runs(audit) else 2).stdout


def has_runs(audit: Path) -> bool:
    return len(list((audit / "runs").glob("[!.]*"))) > 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_run_and_another_attempt_ends_with_the_same_bytes(audit, tmp_path):
    config = write_config(tmp_path / "c.toml", "c", attention_backend="eager", shard_size=1)
    options = [*sized(2), *PROCESS]
    assert_one_dead_rank_ends_the_run(audit, config, *options)
    whole = replay(audit, config, "whole", *options)
    assert replay(audit, config, "killed", *options) == whole
    assert run_info(audit, "killed")["resumed_shards"] >= 1


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_ranks_started_by_torchrun_on_two_nodes_write_the_same_bytes(audit, tmp_path):
    config = write_config(tmp_path / "c.toml", "c", dtype="bfloat16", attention_backend="eager")
    options = [*sized(2), *PROCESS]
    spawned = replay(audit, config, "spawned", *options)
    port = free_port()
    nodes = []
    for node in range(2):
        arguments = command("replay", audit, "--config", config, "--name", "joined", *options)
        # After the interpreter and -m: the module and what it is given.
        launch = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
            str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port",
            str(port), "-m", *arguments[2:],
        ]  # fmt: skip
        nodes.append(
            subprocess.Popen(
                launch,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        )
    outputs = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert outputs[0][0].startswith("joined\t")
    assert outputs[1][0] == ""
    assert tokens(audit, "joined").read_bytes() == spawned


@pytest.fixture
def cuda_audit(model, prompts, tmp_path) -> Path:
    audit = tmp_path / "cuda"
    run("record", model, "--prompts", prompts, "-o", audit, "--max-tokens", 12, "--ignore-eos",
        "--set", "device=cuda", *SMALL)  # fmt: skip
    return audit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_that_talks_over_nccl_changes_no_byte(cuda_audit, tmp_path, dtype):
    config = write_config(tmp_path / "c.toml", "c", device="cuda", dtype=dtype)
    one = replay(cuda_audit, config, "one")
    assert replay(cuda_audit, config, "process", *PROCESS) == one
    info = run_info(cuda_audit, "process")
    assert info["ranks"]["transport"] == "nccl"
    assert info["ranks"]["reports"][0]["peak_device_bytes"] > 0
    assert replay(cuda_audit, config, "stages", *sized(1, 2), *EMULATED) == one


@pytest.mark.gpu
def test_more_processes_than_gpus_are_refused(cuda_audit, tmp_path):
    config = write_config(tmp_path / "c.toml", "c", device="cuda")
    done = run(
        "replay", cuda_audit, "--config", config, *sized(1, 4), *PROCESS,
        code=2, CUDA_VISIBLE_DEVICES="0",
    )  # fmt: skip
    assert "needs a CUDA device a rank" in done.stderr


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_write_what_one_writes(cuda_audit, tmp_path, dtype):
    config = write_config(tmp_path / "c.toml", "c", device="cuda", dtype=dtype)
    one = replay(cuda_audit, config, "one")
    assert replay(cuda_audit, config, "stages", *sized(1, 2), *PROCESS) == one
    two = replay(cuda_audit, config, "two", *sized(2), *PROCESS)
    assert replay(cuda_audit, config, "alike", *sized(2), *EMULATED) == two
    assert two != one


@pytest.mark.multigpu
def test_a_killed_rank_ends_the_run_on_two_gpus(cuda_audit, tmp_path):
    config = write_config(tmp_path / "c.toml", "c", device="cuda", shard_size=1)
    assert_one_dead_rank_ends_the_run(cuda_audit, config, *sized(2), *PROCESS)
