"""`record --exact-positions`: which positions, which bytes, and the exact KL of replays there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.commands import SMALL, run, run_info, write_config
from trace_audit.config import default_record_config, override
from trace_audit.errors import AuditDirError, UsageError
from trace_audit.jobs import Event, Message, Progress, RecordJob, ReplayJob, Stage
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.exact_files import (
    FullLogprobsFile,
    logprob_rows,
    open_full_logprobs,
    read_exact_kl,
)

POSITIONS = 20
VOCABULARY = 512
Job = Callable[..., RecordJob]


def config(**changes: Any) -> Any:
    values = {"device": "cpu", "max_num_seqs": 4, "num_threads": 1, "shard_size": 3} | changes
    return override(default_record_config(), {f"engine.{k}": v for k, v in values.items()})


@pytest.fixture(scope="module")
def stopping(model: Path, prompts: Path, tmp_path_factory) -> dict[str, Any]:
    """What ends the sequences of the prompts at different lengths."""
    done = record(
        RecordJob(
            model=str(model), prompts_path=prompts, output=tmp_path_factory.mktemp("x") / "audit",
            config=config(), max_tokens=12, temperature=0.0, seed=5, ignore_eos=True,
            stop_token_ids=(), stop_strings=(), exact_positions=0, force=False,
        )
    )  # fmt: skip
    outputs = [s.output_token_ids.tolist() for s in done.read_trace()]
    return {"stop_token_ids": tuple({output[2 + i] for i, output in enumerate(outputs[:5])})}


@pytest.fixture(scope="module")
def job(model: Path, prompts: Path, stopping) -> Job:
    def make(output: Path, **changes: Any) -> RecordJob:
        whole = RecordJob(
            model=str(model), prompts_path=prompts, output=output, config=config(), max_tokens=12,
            temperature=0.0, seed=5, ignore_eos=True, stop_token_ids=stopping["stop_token_ids"],
            stop_strings=(), exact_positions=POSITIONS, force=False,
        )  # fmt: skip
        return replace(whole, **changes)

    return make


def record(job: RecordJob, emit: Callable[[Event], None] = lambda event: None) -> AuditDir:
    from trace_audit.audit import execute

    execute(job, emit)
    return AuditDir.open(job.output)


def replay(audit: AuditDir, name: str, *, only: tuple[str, ...] = (), **changes: Any) -> Path:
    from trace_audit.audit import execute

    job = ReplayJob(
        audit=audit.path, config=config(**changes), run_name=name, model=None, model_path=None,
        only=only, repeat_of=None, force=False,
    )  # fmt: skip
    execute(job, lambda event: None)
    return audit.run_directory(name)


@pytest.fixture(scope="module")
def exact(job: Job, tmp_path_factory) -> AuditDir:
    """An audit with exact positions; to be read, and replayed under new names."""
    return record(job(tmp_path_factory.mktemp("exact") / "audit"))


def file_of(audit: AuditDir) -> FullLogprobsFile:
    file = open_full_logprobs(audit, "record")
    assert file is not None
    return file


def positions(audit: AuditDir) -> list[tuple[int, int]]:
    file = file_of(audit)
    return list(zip(file.sequence_index.tolist(), file.step.tolist(), strict=True))


def smallest(lengths: list[int], count: int, seed: int) -> list[tuple[int, int]]:
    """The chosen positions, from the rule itself."""
    from trace_audit.exact_positions import position_priorities

    every = [(i, t) for i, length in enumerate(lengths) for t in range(length)]
    index, step = (np.array(column) for column in zip(*every, strict=True))
    order = np.argsort(position_priorities(seed, index, step))
    return sorted(every[i] for i in order[:count])


def test_the_positions_are_those_of_smallest_hash_whatever_the_lengths(exact):
    lengths = [len(s.output_token_ids) for s in exact.read_trace()]
    assert len(set(lengths)) > 1
    assert max(lengths) == 12
    assert positions(exact) == smallest(lengths, POSITIONS, seed=5)
    assert run_info(exact.path, "record")["exact_positions"] == POSITIONS
    assert exact.verify() == []


@pytest.mark.parametrize("changes", [{"shard_size": 1}, {"shard_size": 10, "max_num_seqs": 2}])
def test_shards_and_batches_do_not_move_them(exact, job, tmp_path, changes):
    other = record(job(tmp_path / "audit", config=config(**changes)))
    assert positions(other) == positions(exact)


def test_another_seed_chooses_others(exact, job, tmp_path):
    other = record(job(tmp_path / "audit", seed=6))
    assert other.info.trace_sha256 != ""
    assert positions(other) != positions(exact)


def test_rows_are_the_run_s_own_logprobs(exact):
    tokens = exact.read_tokens("record").to_pylist()
    rows = {(r["sequence_index"], r["step"]): r for r in tokens}
    seen = 0
    for numbers, table in file_of(exact).read(np.ones(POSITIONS, dtype=np.bool_)):
        for number, logprobs in zip(numbers, logprob_rows(table), strict=True):
            row = rows[positions(exact)[number]]
            assert logprobs.shape == (VOCABULARY,)
            assert logprobs[row["token_id"]] == np.float32(row["logprob"])
            assert logprobs[row["top_token_ids"]].tolist() == row["top_logprobs"]
            seen += 1
    assert seen == POSITIONS


def test_an_interrupted_record_ends_with_the_bytes_of_an_uninterrupted_one(exact, job, tmp_path):
    class InterruptedError_(Exception):
        pass

    def interrupt(event: Event) -> None:
        # After the second shard: its rows and its distributions are written.
        if isinstance(event, Progress) and len(finished()) == 2:
            raise InterruptedError_

    output = tmp_path / "audit"

    def finished() -> list[Path]:
        return sorted((output / ".record.partial").glob("shard-*.json"))

    with pytest.raises(InterruptedError_):
        record(job(output), interrupt)
    assert len(finished()) == 2
    # The later of them is damaged meanwhile, and done again.
    shutil.copy(
        output / ".record.partial" / "shard-000000.attachment",
        output / ".record.partial" / "shard-000001.attachment",
    )
    resumed = record(job(output))
    assert run_info(output, "record")["resumed_shards"] == 1
    for name in ("full_logprobs.parquet", "tokens.parquet"):
        ours, theirs = (audit.run_directory("record") / name for audit in (resumed, exact))
        assert ours.read_bytes() == theirs.read_bytes()
    assert not (output / ".record.partial").exists()


def test_a_record_interrupted_with_another_number_of_positions_is_refused(job, tmp_path):
    def interrupt(event: Event) -> None:
        if isinstance(event, Progress) and list(tmp_path.glob("audit/.record.partial/shard-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(job(tmp_path / "audit"), interrupt)
    with pytest.raises(AuditDirError, match="interrupted under other settings"):
        record(job(tmp_path / "audit", exact_positions=POSITIONS + 1))


def test_a_trace_of_fewer_tokens_keeps_all_and_says_so(job, tmp_path):
    events: list[Event] = []
    audit = record(job(tmp_path / "audit", exact_positions=1000), events.append)
    assert len(positions(audit)) == audit.info.num_output_tokens
    said = [e.text for e in events if isinstance(e, Message)]
    assert any(f"{audit.info.num_output_tokens} scored tokens, fewer than" in s for s in said)
    stages = [e.text for e in events if isinstance(e, Stage)]
    most = 10 * 12
    assert f"{most} x 512 x 4 bytes = 0.2 MB" in " ".join(stages)


def test_what_no_disk_or_memory_holds_is_refused_with_a_number_that_fits():
    from trace_audit.exact_record import check_exact_size

    with pytest.raises(UsageError, match=r"1,000,000,000 x 152,000 x 4 bytes = 608,000.0 GB") as e:
        check_exact_size(
            10**9, vocabulary_size=152_000, most_tokens=10**10, num_shards=9, output=Path("x/y")
        )
    assert "--exact-positions" in str(e.value.hint)


def test_masked_tokens_are_never_chosen(job, model, tmp_path):
    mask = [True, False, True, False, False, True]
    line = {
        "prompt_token_ids": [5, 6], "output_token_ids": [9, 8, 7, 6, 5, 4],
        "score_mask": mask,
    }  # fmt: skip
    path = tmp_path / "rollout.jsonl"
    path.write_text(json.dumps(line) + "\n")
    audit = record(job(tmp_path / "audit", prompts_path=path, stop_token_ids=()))
    assert positions(audit) == [(0, 0), (0, 2), (0, 5)]


def test_a_replay_of_the_record_s_own_configuration_has_exactly_no_kl(exact):
    replay(exact, "same")
    table = read_exact_kl(exact, "same")
    assert table is not None
    assert table.num_rows == POSITIONS
    assert set(table["kl_from_record"].to_pylist()) == {0.0}
    assert set(table["kl_to_record"].to_pylist()) == {0.0}


def test_a_replay_tells_both_directions_and_its_shards_do_not_matter(exact):
    replay(exact, "bf16", dtype="bfloat16")
    replay(exact, "bf16-shards", dtype="bfloat16", shard_size=1, max_num_seqs=1)
    table = read_exact_kl(exact, "bf16")
    assert table is not None
    forward, backward = (table[name].to_numpy() for name in ("kl_from_record", "kl_to_record"))
    assert (forward > 0).all()
    assert (backward > 0).all()
    assert (forward != backward).all()
    # The two directions of a small difference agree to first order.
    assert forward.mean() == pytest.approx(backward.mean(), rel=0.05)
    other = read_exact_kl(exact, "bf16-shards")
    assert other is not None
    assert other["step"].equals(table["step"])
    assert exact.verify() == []


def test_a_subset_has_the_positions_of_its_sequences(exact):
    replay(exact, "part", only=("chat", "long"), dtype="bfloat16")
    table = read_exact_kl(exact, "part")
    assert table is not None
    expected = [place for place in positions(exact) if place[0] in (1, 3)]
    found = zip(table["sequence_index"].to_pylist(), table["step"].to_pylist(), strict=True)
    assert list(found) == expected


def test_damage_is_seen(exact, tmp_path):
    audit = AuditDir.open(shutil.copytree(exact.path, tmp_path / "audit"))
    replay(audit, "x", dtype="bfloat16")
    for run_name, name in (("record", "full_logprobs.parquet"), ("x", "exact_kl.parquet")):
        path = audit.run_directory(run_name) / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        assert [name in problem for problem in audit.verify()] == [True]
        if run_name == "record":
            with pytest.raises(AuditDirError, match="sha256"):
                replay(audit, "y")
        path.write_bytes(whole)
    assert audit.verify() == []


def test_without_the_option_nothing_is_added(recorded):
    assert sorted(p.name for p in (recorded / "runs" / "record").iterdir()) == [
        "run.json",
        "tokens.parquet",
    ]
    assert run_info(recorded, "record")["exact_positions"] == 0
    assert open_full_logprobs(AuditDir.open(recorded), "record") is None


def test_the_commands_where_another_rank_than_the_first_samples(model, prompts, tmp_path):
    audit = tmp_path / "audit"
    sets = ["--set", "device=cpu", *SMALL]
    done = run(
        "record", model, "--prompts", prompts, "-o", audit, "--max-tokens", 6, "--ignore-eos",
        "--exact-positions", 15, *sets,
    )  # fmt: skip
    assert "15 x 512 x 4 bytes" in done.stderr
    path = write_config(tmp_path / "c.toml", "split", dtype="float32", attention_backend="eager")
    split = ["--set", "pipeline_parallel_size=2", "--set", "backend=process"]
    run("replay", audit, "--config", path, "--name", "split", *split)
    table = pq.read_table(audit / "runs" / "split" / "exact_kl.parquet")
    assert table.num_rows == 15
    # Stages add nothing up, so every bit is the record's.
    assert set(table["kl_from_record"].to_pylist()) == {0.0}


def test_a_prefill_pass_is_compared_at_the_same_positions(exact: AuditDir) -> None:
    """Its rows come in blocks of a sequence, not one a step."""
    replay(exact, "decoded")
    replay(exact, "passed", path="prefill")
    decoded, passed = (read_exact_kl(exact, name) for name in ("decoded", "passed"))
    assert decoded is not None
    assert passed is not None
    assert passed["step"].to_pylist() == decoded["step"].to_pylist()
    assert passed["sequence_index"].to_pylist() == decoded["sequence_index"].to_pylist()
    assert 0 <= max(passed["kl_from_record"].to_pylist()) < 1e-9


def test_processed_statistics_leave_whole_distributions_out(
    exact: AuditDir, job: Job, tmp_path: Path
) -> None:
    scoring = {"scoring.mode": "processed", "scoring.temperature": 0.5}
    with pytest.raises(UsageError, match="model's own distributions"):
        record(job(tmp_path / "audit", config=override(config(), scoring)))
    assert not (tmp_path / "audit").exists()
