"""Faults that people met in neighbouring systems: which tests hold each of them here.

`HELD` is the index, by number of the case; the tests below are those that belong to no one part.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.diff.synthetic import FakeAudit, model_audit, run_info
from tests.tiny import VOCABULARY, Harness, random_prompts, save_tokenizer
from trace_audit.diff.compare import compare
from trace_audit.diff.source import AuditSource
from trace_audit.storage.trace import TraceSequence

ROOT = Path(__file__).parent.parent

HELD: dict[int, tuple[str, ...]] = {
    # KV in 8 bits: decode and prefill disagree from one absolute position on.
    1: (
        "tests/diff/test_onset.py::test_case_1_a_persistent_onset_at_position_97",
        "tests/report/test_structure.py::test_the_terminal_names_the_onset",
        "tests/selftest/test_faults.py::"
        "test_swapped_keys_change_everything_from_one_position_on_and_nothing_before",
    ),
    # Launches of more than 255 tokens take another kernel.
    2: (
        "tests/engine/test_prefill_path.py::test_launches_around_256_tokens_are_right_on_every_backend",
        "tests/diff/test_slices.py::test_by_tokens_of_the_launch",
    ),
    # Outliers at chunk boundaries hidden by a tiny mean.
    3: (
        "tests/test_cases.py::test_3_outliers_at_chunk_boundaries_are_named_with_their_period",
        "tests/diff/test_metrics.py::test_rare_outliers_under_a_tiny_mean_are_visible",
        "tests/diff/test_onset.py::test_a_period_names_its_residue_and_only_where_it_is_real",
    ),
    # The mean difference is 0 while many ratios are outside [0.9, 1.1].
    4: ("tests/diff/test_metrics.py::test_zero_mean_with_a_wide_spread_is_visible",),
    # Flips where the margin is small, and a switch that changed two things at once.
    5: (
        "tests/diff/test_compare.py::test_a_flip_carries_its_margins",
        "tests/diff/test_identity.py::test_every_differing_key_is_listed_and_the_name_is_not",
        "tests/diff/test_identity.py::test_more_than_one_differing_key_is_warned_about",
    ),
    # Equal top logprobs: the rank differs between code paths.
    6: (
        "tests/kernels/test_token_stats.py::test_rank_and_ties_count_the_whole_vocabulary",
        "tests/kernels/test_token_stats.py::test_equal_logits_give_the_lowest_id",
        "tests/kernels/test_token_stats.py::test_top_ids_are_a_stable_sort_by_value_then_id",
        "tests/diff/test_flips.py::test_a_change_into_or_out_of_a_tie_is_a_tie_change",
    ),
    # Ranks shifted by merging the forced token into the top-k.
    7: (
        "tests/test_cases.py::test_7_the_forced_token_changes_its_own_statistics_and_no_others",
        "tests/kernels/test_token_stats.py::test_rank_and_ties_count_the_whole_vocabulary",
    ),
    # A NaN logit with a rank; padding lanes that are counted.
    8: (
        "tests/test_cases.py::test_8_a_row_without_a_normalizer_has_no_rank",
        "tests/kernels/test_token_stats.py::"
        "test_nan_and_infinite_logits_make_the_normalizer_non_finite",
        "tests/kernels/test_token_stats.py::test_padding_lanes_never_count_for_an_impossible_token",
        "tests/engine/test_replay.py::test_a_non_finite_row_is_visible_and_stops_nothing",
    ),
    # A clamp lets NaN through, and the JSON breaks.
    9: (
        "tests/report/test_formats.py::"
        "test_json_is_strict_and_writes_non_finite_numbers_as_strings",
        "tests/storage/test_reading.py::"
        "test_every_value_survives_nan_infinities_and_nulls_included",
        "tests/diff/test_gate.py::test_a_non_finite_candidate_fails_even_where_its_other_rows_pass",
    ),
    # Renormalized logprobs against raw ones.
    10: (
        "tests/diff/test_scoring.py::test_two_distributions_are_refused_either_way",
        "tests/diff/test_scoring.py::test_the_refusal_names_both_and_ends_with_4",
    ),
    # A temperature on one side only.
    11: (
        "tests/diff/test_scoring.py::test_what_a_run_scored",
        "tests/diff/test_hints.py::test_a_temperature_on_one_side_is_one_scale_of_greedy_logprobs",
        "tests/diff/test_hints.py::test_a_temperature_of_an_import_is_found_from_the_other_sides_distribution",
    ),
    # Text tokenized anew: everything shifts by one.
    12: (
        "tests/storage/test_import_shift.py::test_a_shift_by_one",
        "tests/diff/test_hints.py::test_logprobs_shifted_by_one_are_told_with_the_direction",
    ),
    # A BOS token dropped or doubled on one side.
    13: (
        "tests/test_tokenizer.py::test_a_doubled_bos_is_seen",
        "tests/diff/test_align.py::test_a_moved_position_is_invalid",
        "tests/storage/test_reading.py::test_the_digest_tells_every_part",
    ),
    # Positive logprobs from a 16-bit log-softmax.
    14: (
        "tests/test_cases.py::test_14_no_logprob_is_positive_in_half_precision",
        "tests/storage/test_prompts.py::test_positive_logprobs_are_warned_about",
    ),
    # A logprob of 0 for every token.
    15: (
        "tests/diff/test_hints.py::test_a_constant_logprob_is_told",
        "tests/diff/test_hints.py::test_another_constant_column_is_told",
    ),
    # A trace cut to the default max_tokens.
    16: (
        "tests/engine/test_input_processor.py::test_a_trace_longer_than_the_default_max_tokens_is_not_cut",
    ),
    # An empty trace ends the server.
    17: (
        "tests/engine/test_input_processor.py::test_bad_traces_are_refused_by_name_and_value",
        "tests/engine/test_input_processor.py::test_the_next_request_works_after_a_refusal",
    ),
    # An id outside the vocabulary reads foreign memory.
    18: (
        "tests/engine/test_input_processor.py::test_bad_traces_are_refused_by_name_and_value",
        "tests/engine/test_input_processor.py::test_prompts_are_checked_the_same_way",
    ),
    # A trace written past its row.
    19: ("tests/engine/test_state.py::test_a_write_that_leaves_the_row_is_refused_at_staging",),
    # A reused slot replays the request before.
    20: (
        "tests/engine/test_state.py::test_a_reused_slot_does_not_replay_its_former_trace",
        "tests/engine/test_pressure.py::test_a_normal_request_after_a_replayed_one_is_as_if_nothing_had_been",
        "tests/engine/test_pressure.py::test_a_queue_longer_than_the_slots_reuses_each_of_them",
    ),
    # A batch order that differs between processes.
    21: ("tests/test_end_to_end.py::test_replay_under_the_same_config_is_the_same_file",),
    # Sums whose order is left to chance.
    22: ("tests/engine/test_neighbours.py::test_experts_give_the_same_bytes_every_time",),
    # Routers that choose other experts make large deltas.
    23: (
        "tests/test_cases.py::test_23_noise_in_one_layers_router_is_seen_at_that_layer",
        "tests/test_router_end_to_end.py::"
        "test_bf16_flips_routers_and_the_report_splits_delta_by_it",
        "tests/test_router_end_to_end.py::test_a_healthy_rerun_chooses_the_same_experts",
        "tests/engine/test_routing.py::test_decode_and_prefill_store_what_the_router_chose",
        "tests/diff/test_router.py::test_by_hand",
    ),
    # Another batch changes the output, deterministically.
    24: (
        "tests/engine/test_neighbours.py::test_other_neighbours_give_other_bits_and_the_same_ones_each_time",
        "tests/report/test_batch_axis.py::test_batching_alone",
        "tests/test_fixed_batch_audits.py::test_shards_and_company_change_no_bit",
    ),
    # A baseline from another machine condemned a good build.
    25: (
        "tests/diff/test_identity.py::test_another_environment_is_warned_about_with_its_keys",
        "tests/report/test_terminal.py::test_a_different_environment_is_spelled_out",
        "tests/test_environment.py::test_what_the_fingerprint_covers",
    ),
    # An empty or disjoint comparison passes.
    26: (
        "tests/diff/test_align.py::test_empty_duplicate_and_missing_rows_are_invalid",
        "tests/diff/test_align.py::test_disjoint_subsets_are_invalid",
        "tests/diff/test_cli.py::test_vacuous_and_wrong_comparisons_never_pass",
        "tests/diff/test_on_disk.py::test_disjoint_runs_exit_4",
    ),
    # A chat template differs between two records of one prompt.
    27: (
        "tests/test_cases.py::test_27_another_chat_template_is_another_tokenizer_and_other_ids",
        "tests/storage/test_fingerprint.py::test_a_tokenizer_is_its_files_and_templates",
        "tests/storage/test_reading.py::test_the_digest_tells_every_part",
    ),
    # A tokenizer of another size than the model's embedding.
    28: (
        "tests/test_cases.py::test_28_a_best_token_outside_the_tokenizer_is_shown_by_its_id",
        "tests/test_tokenizer.py::test_a_vocabulary_wider_or_narrower_than_the_tokenizer",
        "tests/report/test_terminal.py::test_the_report_says_what_a_reader_must_know",
    ),
    # A tied head gathered in the wrong order by ranks.
    29: (
        "tests/parallel/test_split.py::test_tensor_parallel_ranks_give_the_logprobs_of_one",
        "tests/parallel/test_plan.py::test_a_vocabulary_that_does_not_divide_leaves_the_last_rank_fewer_rows",
    ),
    # Nine heads over two ranks.
    30: (
        "tests/parallel/test_plan.py::test_nine_heads_over_two_ranks_are_refused_with_the_sizes_that_work",
        "tests/test_ranks_end_to_end.py::test_nine_heads_over_two_ranks_are_refused_at_once",
    ),
    # A half-written result reads as a whole one.
    31: (
        "tests/storage/test_resume.py::test_kill_9_in_the_middle_of_writing",
        "tests/storage/test_disk.py::test_a_full_disk_in_the_middle_and_then_a_resume",
        "tests/cli/test_signals.py::test_a_signal_ends_the_command_and_its_run",
    ),
    # Hostile token text breaks the report.
    32: (
        "tests/test_text.py::test_no_character_that_a_terminal_acts_on_is_left",
        "tests/test_text.py::test_markup_is_shown_as_it_is",
        "tests/report/test_terminal.py::test_markup_in_tokens_and_names_is_shown_literally",
        "tests/report/test_terminal.py::test_a_lone_surrogate_in_an_id_does_not_break_the_report",
        "tests/report/test_html.py::test_hostile_text_is_visible_and_nothing_else",
        "tests/report/test_html.py::test_data_cannot_end_its_script_element",
        "tests/report/test_formats.py::test_json_survives_lone_surrogates_and_hostile_text",
        "tests/report/test_formats.py::test_markdown_escapes_what_a_token_says",
    ),
    # Two runs of one machine meet on a port.
    33: (
        "tests/test_runner_ranks.py::test_two_worlds_at_once_do_not_meet",
        "tests/test_fixed_batch_audits.py::test_two_audits_of_several_ranks_at_once",
    ),
    # A worker dies and the others wait.
    34: (
        "tests/test_runner_ranks.py::test_the_rank_that_fails_is_named_and_all_end",
        "tests/test_runner_ranks.py::test_a_rank_that_does_not_answer_is_named",
        "tests/test_ranks_end_to_end.py::test_a_killed_rank_ends_the_run_and_another_attempt_ends_with_the_same_bytes",
    ),
}


def test_every_case_has_its_tests() -> None:
    assert sorted(HELD) == list(range(1, 35))


@pytest.mark.parametrize("case", HELD)
def test_every_test_of_the_index_is_there(case: int) -> None:
    for name in HELD[case]:
        path, function = name.split("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, name


def test_3_outliers_at_chunk_boundaries_are_named_with_their_period() -> None:
    length, chunk, sequences = 480, 48, 6
    generator = np.random.default_rng(0)
    record = generator.normal(0, 2.5, (sequences * length, 60))
    candidate = record + 1e-4 * generator.normal(size=record.shape)
    audit = model_audit({"record": record, "b": candidate}, length=length)
    position = audit.tables["record"]["position"].to_numpy()
    boundary = np.flatnonzero(position % chunk == 0)
    best = record.argmax(axis=1)
    candidate[boundary, best[boundary]] -= generator.uniform(2, 17, len(boundary))
    audit = model_audit({"record": record, "b": candidate}, length=length)
    audit.infos["b"] = run_info("b", max_num_batched_tokens=chunk)
    summary = compare(AuditSource(cast(Any, audit)), "record", "b").summary
    assert all(token.place.position % chunk == 0 for token in summary.worst)
    assert max(abs(token.delta) for token in summary.worst) > 10
    assert summary.structure is not None
    period = next(p for p in summary.structure.periods if p.size == chunk)
    assert period.stands_out
    assert period.residue == 0
    median = summary.metric("abs.p50")
    assert median is not None
    assert median.value is not None
    assert median.value < 1e-3


def test_7_the_forced_token_changes_its_own_statistics_and_no_others(checkpoint, device):
    prompts = random_prompts([7])
    harness = Harness.make(checkpoint(), device)
    free = harness.record(prompts, 6)[0]
    best = int(free.top_token_ids[-1, 0])
    fifth = int(free.top_token_ids[-1, -1])
    outside = next(v for v in range(VOCABULARY) if v not in free.support_token_ids[-1])
    rows = {}
    for token in (best, fifth, outside):
        trace = [*free.token_ids[:-1].tolist(), token]
        request = harness.request(0, prompts[0], trace_decode_token_ids=trace)
        rows[token] = harness.run([request])[0]
    for row in rows.values():
        for name in ("top_token_ids", "top_logprobs", "logits_hash", "entropy"):
            assert (getattr(row, name)[-1] == getattr(free, name)[-1]).all()
    assert rows[best].rank[-1] == 1
    assert rows[fifth].rank[-1] == 5
    assert rows[fifth].logprob[-1] == free.top_logprobs[-1, -1]
    assert rows[outside].rank[-1] > 20


def test_8_a_row_without_a_normalizer_has_no_rank(checkpoint, device):
    from trace_audit.run_tables import shard_table

    harness = Harness.make(checkpoint(), device)
    with torch.no_grad():
        harness.loaded.model.get_output_embeddings().weight[5] = float("nan")
    table = shard_table(harness.record(random_prompts([5]), 3), [0])
    assert table["rank"].null_count == 3
    assert table["tie_count"].null_count == 3
    assert np.isnan(table["logprob"].to_numpy()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_14_no_logprob_is_positive_in_half_precision(checkpoint, device, dtype):
    harness = Harness.make(checkpoint(), device, dtype=dtype)
    with torch.no_grad():
        # Logits so far apart that the best token has all of the mass. By the norm: weights of a
        # packed head cannot be reached.
        harness.loaded.model.model.norm.weight.mul_(16)
    for output in harness.record(random_prompts([5, 9, 16]), 24):
        assert np.isfinite(output.logprob).all()
        assert output.logprob.max() <= 0
        assert output.top_logprobs.max() <= 0
        assert output.support_logprobs[output.support_token_ids >= 0].max() <= 0


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_23_noise_in_one_layers_router_is_seen_at_that_layer(checkpoint, device, layer):
    """No layer before it can choose otherwise; what is behind it may."""
    prompts = random_prompts([7, 12, 20, 9])
    healthy = Harness.make(checkpoint("qwen3-moe"), device)
    recorded = healthy.record(prompts, 24)
    noisy = Harness.make(checkpoint("qwen3-moe"), device)
    router = noisy.loaded.model.model.layers[layer].mlp.gate
    with torch.no_grad():
        noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0))
        router.weight += 0.05 * noise.to(device)
    runs = {
        "record": recorded,
        "again": Harness.make(checkpoint("qwen3-moe"), device).replay(prompts, recorded),
        "noisy": noisy.replay(prompts, recorded),
    }
    source = AuditSource(cast(Any, engine_audit(prompts, runs, healthy.loaded.routing)))
    again = compare(source, "record", "again").summary
    assert again.bitwise
    assert again.router is not None
    assert again.router.changed == 0
    summary = compare(source, "record", "noisy").summary
    router = summary.router
    assert router is not None
    assert router.first_layer == layer
    shares = {one.layer: one.share for one in router.layers}
    assert all(share == 0 for before, share in shares.items() if before < layer)
    assert 0.01 < shares[layer] < 0.5
    changed, same = (summary.metric(f"router.abs_{kind}") for kind in ("changed", "same"))
    assert changed is not None
    assert same is not None
    assert changed.value is not None
    assert same.value is not None
    # Tokens whose own routers agree see what others left in keys and values.
    assert changed.value > same.value


def engine_audit(prompts: list[list[int]], runs: dict[str, Any], routing: Any) -> FakeAudit:
    """An audit of what engines returned; its trace is the record's."""
    from dataclasses import asdict

    from trace_audit.run_tables import shard_table

    sequences = [
        TraceSequence(
            sequence_id=output.request_id,
            group_id=output.request_id,
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            output_token_ids=output.token_ids,
            score_mask=None,
            finish_reason="length",
            source="greedy",
            support_token_ids=output.support_token_ids,
        )
        for prompt, output in zip(prompts, runs["record"], strict=True)
    ]
    tables = {
        name: shard_table(outputs, range(len(prompts))).drop_columns(["support_token_ids"])
        for name, outputs in runs.items()
    }
    infos = {name: run_info(name) | {"routing": asdict(routing)} for name in runs}
    return FakeAudit(sequences=sequences, tables=tables, infos=infos)


def test_27_another_chat_template_is_another_tokenizer_and_other_ids(tmp_path):
    from trace_audit.storage.fingerprint import tokenizer_fingerprint
    from trace_audit.storage.prompts import PromptEntry
    from trace_audit.tokenizer import load_tokenizer, render_prompt

    entry = PromptEntry(
        index=0,
        line_number=1,
        sequence_id="a",
        group_id="a",
        messages=[{"role": "user", "content": "two and two?"}],
    )
    rendered, prints = [], []
    for name in ("one", "other"):
        directory = save_tokenizer(tmp_path / name)
        template = directory / "chat_template.jinja"
        assert template.is_file()
        if name == "other":
            template.write_text("You are brief. " + template.read_text())
        rendered.append(render_prompt(load_tokenizer(directory), entry))
        prints.append(tokenizer_fingerprint(directory))
    assert rendered[0] != rendered[1]
    assert prints[0] != prints[1]


def test_28_a_best_token_outside_the_tokenizer_is_shown_by_its_id() -> None:
    """A padded column that wins is neither hidden nor given another token's text."""
    record = np.random.default_rng(0).normal(0, 1.0, (16, 60))
    candidate = record.copy()
    candidate[3, 59] = 9.0
    audit = model_audit({"record": record, "b": candidate}, length=8)
    audit.texts = {58: b"", 59: b""}
    summary = compare(AuditSource(cast(Any, audit)), "record", "b").summary
    assert summary.worst[0].candidate_top[0].text == "<id 59>"
    trace = AuditSource(cast(Any, audit)).trace_identity()
    assert (trace.vocabulary_size, trace.tokenizer_size) == (60, 58)
