"""The commands as a user runs them, on a tiny model: processes, files, bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from tests.commands import (
    SMALL,
    command,
    finished_shards,
    run,
    run_info,
    tokens,
    wait_for_the_lock,
    write_config,
)
from tests.tiny import save_tiny, save_tokenizer

FLOATS = ("logprob", "top_logprobs", "entropy", "logsumexp", "support_logprobs", "log_tail_mass")


def test_record_makes_an_audit_whose_rows_are_in_order(recorded):
    table = pq.read_table(tokens(recorded, "record"))
    assert table.num_rows == 10 * 12
    index, step = table["sequence_index"].to_numpy(), table["step"].to_numpy()
    assert (index == np.repeat(np.arange(10), 12)).all()
    assert (step == np.tile(np.arange(12), 10)).all()
    assert set(table["sequence_id"].to_pylist()[:48:12]) == {"text", "chat", "ids", "long"}
    assert (table["rank"].to_numpy() == 1).all()
    info = run_info(recorded, "record")
    assert info["complete"] is True
    assert info["counters"]["sequences"] == 10
    assert info["counters"]["tokens"] == 120
    assert info["counters"]["nonfinite_rows"] == 0
    assert pq.ParquetFile(tokens(recorded, "record")).num_row_groups == 3


def test_the_full_model_was_checked_against_transformers(recorded):
    check = run_info(recorded, "record")["model_check"]
    assert check["tokens"] > 0
    assert 0 <= check["max_abs_delta_logprob"] < 1e-4


def test_replay_under_the_same_config_is_the_same_file(audit, tmp_path):
    """Case 21: processes that order sets and hashes otherwise write the same bytes."""
    config = write_config(
        tmp_path / "same.toml", "same", dtype="float32", attention_backend="eager"
    )
    run("replay", audit, "--config", config, PYTHONHASHSEED="1")
    assert tokens(audit, "same").read_bytes() == tokens(audit, "record").read_bytes()
    report = run("diff", "report", audit)
    assert "BITWISE" in report.stdout
    run("replay", audit, "--config", config, "--name", "again", PYTHONHASHSEED="2")
    assert tokens(audit, "again").read_bytes() == tokens(audit, "record").read_bytes()


def test_a_bfloat16_replay_moves_the_numbers_and_the_report_says_where_first(audit, tmp_path):
    config = write_config(tmp_path / "b.toml", "bf16", dtype="bfloat16", attention_backend="sdpa")
    done = run("replay", audit, "--config", config)
    assert done.stdout.split("\t")[0] == "bf16"
    ours, theirs = (pq.read_table(tokens(audit, name)) for name in ("bf16", "record"))
    assert ours["token_id"].equals(theirs["token_id"])
    assert not ours["logprob"].equals(theirs["logprob"])
    report = json.loads(run("diff", "report", audit, "--format", "json").stdout)
    assert "first" in json.dumps(report)
    shown = run("diff", "show", audit, "--candidate", "bf16", "--worst", 2)
    assert shown.stdout


def test_set_makes_a_cross_product_with_names_of_what_changed(audit, tmp_path):
    config = write_config(tmp_path / "b.toml", "half", dtype="bfloat16", attention_backend="eager")
    done = run("replay", audit, "--config", config, "--set", "block_size=8,32")
    names = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert names == ["half-block_size=8", "half-block_size=32"]
    # Eager attention gathers each row's own context: the block size moves nothing.
    a, b = (tokens(audit, name).read_bytes() for name in names)
    assert a == b


def test_a_replay_killed_in_its_second_shard_resumes_to_the_same_bytes(audit, tmp_path):
    config = write_config(
        tmp_path / "c.toml", "bf16", dtype="bfloat16", attention_backend="eager", shard_size=2
    )
    run("replay", audit, "--config", config, "--name", "whole")
    process = subprocess.Popen(
        command("replay", audit, "--config", config, "--name", "killed"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not finished_shards(audit):
        assert process.poll() is None, "it ended before its first shard was seen"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_the_lock(audit)
    assert not tokens(audit, "killed").exists()
    assert 1 <= len(finished_shards(audit)) < 5
    listed = [line.split() for line in run("ls", audit).stdout.splitlines()]
    assert ["killed", "interrupted"] in [[line[0], line[-1]] for line in listed]
    done = run("replay", audit, "--config", config, "--name", "killed")
    assert done.stdout.startswith("killed\t")
    assert tokens(audit, "killed").read_bytes() == tokens(audit, "whole").read_bytes()
    assert run_info(audit, "killed")["resumed_shards"] >= 1
    assert not finished_shards(audit)


def test_imported_tokens_are_replayed_exactly_and_their_logprobs_are_a_run(model, tmp_path):
    output = [65, 2, 300, 2, 7, 511, 2]  # 2 is EOS; none of these need be an argmax
    lines = [
        {"id": "a", "prompt": "x", "output_token_ids": output, "logprobs": [-1.5] * 7},
        {
            "id": "b",
            "prompt_token_ids": [5, 6],
            "output_token_ids": [9] * 20,
            "logprobs": [-0.25] * 20,
        },
    ]
    path = tmp_path / "rollout.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    audit = tmp_path / "audit"
    run("record", model, "--prompts", path, "-o", audit, "--set", "device=cpu", *SMALL)
    table = pq.read_table(tokens(audit, "record"))
    assert table["token_id"].to_pylist() == output + [9] * 20
    assert max(table["rank"].to_pylist()) > 1
    trace = pq.read_table(audit / "trace.parquet")
    assert trace["source"].to_pylist() == ["imported", "imported"]
    given = pq.read_table(tokens(audit, "imported"))
    assert given["logprob"].to_pylist() == [-1.5] * 7 + [-0.25] * 20
    assert given["rank"].null_count == 27
    config = write_config(tmp_path / "b.toml", "bf16", dtype="bfloat16", attention_backend="eager")
    run("replay", audit, "--config", config)
    assert pq.read_table(tokens(audit, "bf16"))["token_id"].to_pylist() == output + [9] * 20
    report = run("diff", "report", audit, "--baseline", "imported", "--candidate", "bf16")
    assert "n/a" in report.stdout


def test_stop_strings_and_stop_ids_end_a_sequence(model, tmp_path, recorded):
    first = pq.read_table(recorded / "trace.parquet")["output_token_ids"].to_pylist()[2]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [10, 20, 30, 40]}) + "\n")
    audit = tmp_path / "audit"
    run("record", model, "--prompts", path, "-o", audit, "--set", "device=cpu", "--max-tokens", 12,
        "--ignore-eos", "--stop-token-id", first[5], *SMALL)  # fmt: skip
    trace = pq.read_table(audit / "trace.parquet")
    got = trace["output_token_ids"].to_pylist()[0]
    assert got == first[: first.index(first[5]) + 1]
    assert trace["finish_reason"].to_pylist() == ["stop"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompt|empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n', "x"),
        ('{"prompt": "' + "a" * 2000 + '"}\n', "context|max_position|exceed"),
        ('{"prompt_token_ids": [1, 512]}\n', "512"),
        ('{"prompt_token_ids": [1, -2]}\n', "-2"),
        ('{"prompt_token_ids": [1, true]}\n', "[Tt]rue"),
        ('{"prompt": "a", "output_token_ids": []}\n', "empty"),
        ('{"prompt": "a", "output_token_ids": [600]}\n', "600"),
    ],
)
def test_bad_prompts_are_one_sentence_and_nothing_is_written(model, tmp_path, text, message):
    import re

    path = tmp_path / "p.jsonl"
    path.write_text(text)
    audit = tmp_path / "audit"
    done = run("record", model, "--prompts", path, "-o", audit, "--set", "device=cpu", code=2)
    assert re.search(message, done.stderr), done.stderr
    assert "hint:" in done.stderr
    assert not audit.exists()


def test_a_missing_prompts_file(model, tmp_path):
    done = run("record", model, "--prompts", tmp_path / "no.jsonl", "-o", tmp_path / "a", code=2)
    assert "no.jsonl" in done.stderr
    assert not (tmp_path / "a").exists()


def test_cuda_asked_for_where_there_is_none(model, prompts, tmp_path):
    done = run(
        "record", model, "--prompts", prompts, "-o", tmp_path / "a", "--set", "device=cuda",
        code=2, CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert "cuda" in done.stderr.lower()
    assert not (tmp_path / "a").exists()


def damage_no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def damage_no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def damage_pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def damage_remote_code(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModel": "x.Y"}}))


def damage_other_shapes(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 97}))


def damage_missing_weights(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 5}))


def damage_extra_weights(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))


def damage_no_interface(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, BloomConfig

    (directory / "model.safetensors").unlink()
    config = BloomConfig(vocab_size=512, hidden_size=32, n_layer=2, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_no_config, "config.json"),
        (damage_no_weights, "safetensors"),
        (damage_pickle_only, "pickled"),
        (damage_remote_code, "code of its own"),
        (damage_other_shapes, "other shapes"),
        (damage_missing_weights, "lacks"),
        (damage_extra_weights, "unexpected"),
        (damage_no_interface, "attention interface"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_sentence(model, prompts, tmp_path, damage, message):
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    damage(directory)
    audit = tmp_path / "audit"
    done = run(
        "record", directory, "--prompts", prompts, "-o", audit, "--set", "device=cpu", code=2
    )
    assert message in done.stderr
    assert "hint:" in done.stderr
    assert not audit.exists()


def test_a_model_directory_without_a_tokenizer(checkpoint, prompts, tmp_path):
    done = run("record", checkpoint(), "--prompts", prompts, "-o", tmp_path / "a", code=2)
    assert "tokenizer" in done.stderr
    assert not (tmp_path / "a").exists()


def test_a_model_that_needs_no_text_needs_no_tokenizer(checkpoint, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    audit = tmp_path / "a"
    run("record", checkpoint(), "--prompts", path, "-o", audit, "--max-tokens", 3, *SMALL)
    assert tokens(audit, "record").exists()


def test_an_existing_directory_is_refused_without_force(audit, model, prompts):
    before = tokens(audit, "record").read_bytes()
    done = run("record", model, "--prompts", prompts, "-o", audit, code=2)
    assert "--force" in done.stderr
    assert tokens(audit, "record").read_bytes() == before


def test_a_directory_that_is_no_audit_is_never_touched(model, prompts, tmp_path):
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for extra in ([], ["--force"]):
        run("record", model, "--prompts", prompts, "-o", other, *extra, code=2)
        assert (other / "thesis.txt").read_text() == "years of work"
        assert len(list(other.iterdir())) == 1


def test_another_model_than_the_recorded_one_is_refused(audit, tmp_path):
    other = save_tokenizer(save_tiny(tmp_path / "other", "llama", seed=1))
    config = write_config(tmp_path / "c.toml", "moved", attention_backend="eager")
    done = run("replay", audit, "--config", config, "--model-path", other, code=2)
    assert "--model" in done.stderr
    assert not tokens(audit, "moved").exists()
    run("replay", audit, "--config", config, "--model", other)
    ours, theirs = (pq.read_table(tokens(audit, name)) for name in ("moved", "record"))
    assert ours["token_id"].equals(theirs["token_id"])
    assert not ours["logprob"].equals(theirs["logprob"])


def test_only_makes_a_marked_subset(audit, tmp_path):
    config = write_config(tmp_path / "c.toml", "part", attention_backend="eager")
    run("replay", audit, "--config", config, "--only", "ids", "--only", "text")
    table = pq.read_table(tokens(audit, "part"))
    assert sorted(set(table["sequence_id"].to_pylist())) == ["ids", "text"]
    assert sorted(set(table["sequence_index"].to_pylist())) == [0, 2]
    assert run_info(audit, "part")["subset"] == ["text", "ids"]
    run("diff", "report", audit, "--candidate", "part")


def test_dry_run_makes_nothing(audit, tmp_path):
    config = write_config(tmp_path / "c.toml", "dry", attention_backend="eager")
    before = sorted(p for p in audit.rglob("*"))
    done = run("replay", audit, "--config", config, "--dry-run")
    assert "120" in done.stdout
    assert sorted(p for p in audit.rglob("*")) == before


def test_verify_finds_a_flipped_bit(audit):
    run("verify", audit)
    path = tokens(audit, "record")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    done = subprocess.run(command("verify", audit), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "record" in done.stderr + done.stdout


@pytest.mark.parametrize("name", ["audit.json", "runs/record/run.json"])
def test_an_edited_manifest_is_seen(audit, name):
    path = audit / name
    path.write_text(
        path.read_text().replace('"float32"', '"float16"').replace('"seed": 0', '"seed": 1')
    )
    done = subprocess.run(command("verify", audit), capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert "changed after it was written" in done.stderr + done.stdout


def test_a_run_without_its_run_json_is_a_finding(audit, tmp_path):
    (audit / "runs" / "lost").mkdir()
    done = subprocess.run(command("verify", audit), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "lost has no run.json" in done.stderr + done.stdout


@pytest.mark.parametrize("group", [[], ["diff"]])
def test_a_bare_command_prints_its_help_as_it_is(group):
    done = subprocess.run(command(*group), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Commands:\n" in done.stderr
    assert "error:" not in done.stderr


def test_sampled_traces_are_seeded(model, prompts, tmp_path):
    paths = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        paths.append(tmp_path / name)
        run("record", model, "--prompts", prompts, "-o", paths[-1], "--max-tokens", 6,
            "--temperature", 1, "--seed", seed, "--set", "device=cpu", *SMALL)  # fmt: skip
    a, b, c = (pq.read_table(p / "trace.parquet") for p in paths)
    assert a["output_token_ids"].equals(b["output_token_ids"])
    assert not a["output_token_ids"].equals(c["output_token_ids"])
    assert set(a["source"].to_pylist()) == {"sampled"}


def test_float_columns_are_named_as_documented(recorded):
    schema = pq.read_schema(tokens(recorded, "record"))
    assert set(FLOATS) <= set(schema.names)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [("float32", "eager"), ("bfloat16", "sdpa"), ("bfloat16", "triton"), ("float32", "triton")],
)
def test_cuda_record_and_replay_in_two_processes_are_the_same_file(
    model, prompts, tmp_path, dtype, backend
):
    config = write_config(
        tmp_path / "c.toml", "same", device="cuda", dtype=dtype, attention_backend=backend
    )
    audit = tmp_path / "audit"
    run(
        "record", model, "--prompts", prompts, "-o", audit, "--max-tokens", 12, "--ignore-eos",
        "--config", config,
    )  # fmt: skip
    run("replay", audit, "--config", config, PYTHONHASHSEED="7")
    assert tokens(audit, "same").read_bytes() == tokens(audit, "record").read_bytes()
    info = run_info(audit, "same")
    assert info["backends"]["attention"] == backend
    assert info["backends"]["trace_replay"] == "triton"
    assert "gpu_name" in info["environment"]
    assert "BITWISE" in run("diff", "report", audit).stdout


def test_a_replay_whose_rows_are_not_finite_says_so_at_once(audit, model, tmp_path):
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    config = write_config(tmp_path / "e.toml", "e", attention_backend="eager")
    done = run("replay", audit, "--config", config, "--model", broken)
    info = run_info(audit, "e")
    rows = info["counters"]["tokens"]
    assert info["counters"]["nonfinite_rows"] == rows > 0
    assert f"warning: {rows} of {rows} rows are not finite" in done.stderr
