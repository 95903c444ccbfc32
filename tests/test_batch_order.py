"""Batch order as an axis: shuffled by seed, stored in trace order, measured as a floor."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.commands import run, run_info, tokens, write_config
from trace_audit.batch_order import batch_order


@pytest.mark.parametrize("size", [1, 2, 3, 8, 257])
def test_an_order_is_a_permutation_and_seed_0_is_trace_order(size):
    assert batch_order(0, 3, size) == list(range(size))
    for seed in (1, 2, 2**31 - 1):
        order = batch_order(seed, 3, size)
        assert sorted(order) == list(range(size))
        assert (order == list(range(size))) is (size == 1)
        assert order == batch_order(seed, 3, size)


def test_seeds_and_shards_have_orders_of_their_own():
    orders = {tuple(batch_order(seed, shard, 12)) for seed in range(1, 9) for shard in range(8)}
    assert len(orders) == 64


def test_first_places_are_shared_out_evenly():
    firsts = np.bincount([batch_order(seed, 0, 4)[0] for seed in range(1, 2001)], minlength=4)
    # 500 each, at 5 standard errors; the trace's own order, 1 in 24, is turned round.
    assert abs(firsts - 500).max() < 5 * (2000 * 0.25 * 0.75) ** 0.5


@pytest.fixture(scope="module")
def shuffled(recorded, tmp_path_factory):
    """Three batch orders and a rerun of one configuration, whose launches hold three sequences."""
    import shutil

    base = tmp_path_factory.mktemp("shuffled")
    audit = shutil.copytree(recorded, base / "audit")
    config = write_config(
        base / "c.toml", "three", attention_backend="sdpa", max_num_seqs=3, shard_size=10
    )
    kinds = ["--repeat-kind", "batch", "--repeat-kind", "rerun"]
    run("replay", audit, "--config", config, "--repeat", 2, *kinds)
    return audit


def test_repeats_in_another_order_say_so(shuffled):
    infos = {name: run_info(shuffled, name) for name in ("three", "three-batch2", "three-repeat2")}
    assert [i["resolved_config"]["engine"]["batch_order_seed"] for i in infos.values()] == [0, 1, 0]
    assert [i["repeat_of"] for i in infos.values()] == [None, "three", "three"]
    assert [i["repeat_kind"] for i in infos.values()] == [None, "batch", "rerun"]


def test_rows_are_in_trace_order_and_the_launches_are_others(shuffled):
    plain, other = (pq.read_table(tokens(shuffled, n)) for n in ("three", "three-batch2"))
    for column in ("sequence_index", "sequence_id", "step", "position", "token_id"):
        assert plain[column].equals(other[column])
    assert not plain["launch_tokens"].equals(other["launch_tokens"])
    assert np.abs(plain["logprob"].to_numpy() - other["logprob"].to_numpy()).max() < 1e-4


def test_the_report_has_a_batch_floor_beside_that_of_reruns(shuffled):
    report = json.loads(
        run("diff", "report", shuffled, "--candidate", "three", "--format", "json").stdout
    )
    (pair,) = report["pairs"]
    floors = {floor["kind"]: floor for floor in pair["floors"]}
    assert floors["rerun"]["bitwise"] is True
    assert floors["batch"]["runs"] == ["three", "three-batch2"]
    assert floors["batch"]["bitwise"] is False
    metric = next(metric for metric in pair["metrics"] if metric["name"] == "abs.mean")
    assert metric["floor"]["kind"] == "batch"
    assert metric["floor"]["value"] > 0


def test_deterministic_but_different_is_told_apart_from_noise_and_is_no_fault(shuffled):
    options = ["--baseline", "three", "--candidate", "three-batch2", "--no-save"]
    text = run("diff", "report", shuffled, *options).stdout
    assert "engine.batch_order_seed" in text
    assert "The runs differ in batch order alone: deterministic but different" in text
    assert "FAULT" not in text
    report = json.loads(run("diff", "report", shuffled, *options, "--format", "json").stdout)
    assert report["pairs"][0]["fault"] is False
    assert report["pairs"][0]["expected"] is None


def test_one_sequence_at_a_time_is_batch_invariant(audit, tmp_path):
    config = write_config(tmp_path / "c.toml", "alone", attention_backend="sdpa", max_num_seqs=1)
    run("replay", audit, "--config", config, "--repeat", 2, "--repeat-kind", "batch")
    assert "batch invariant" in run("diff", "report", audit, "--candidate", "alone").stdout
    options = ["--baseline", "alone", "--candidate", "alone-batch2"]
    assert "differ in batch order alone, and no bit does" in (
        run("diff", "report", audit, *options).stdout
    )


def test_a_shuffled_record_stores_the_same_trace_in_the_same_order(model, prompts, tmp_path):
    traces = []
    for seed in (0, 5):
        audit = tmp_path / f"a{seed}"
        run(
            "record", model, "--prompts", prompts, "-o", audit, "--max-tokens", 4,
            "--set", "device=cpu", "--set", "max_num_seqs=3", "--set", "num_threads=1",
            "--set", f"batch_order_seed={seed}",
        )  # fmt: skip
        traces.append(pq.read_table(audit / "trace.parquet"))
        rows = pq.read_table(tokens(audit, "record"))
        assert (np.diff(rows["sequence_index"].to_numpy()) >= 0).all()
    for column in ("sequence_id", "prompt_token_ids", "output_token_ids", "finish_reason"):
        assert traces[0][column].equals(traces[1][column])
