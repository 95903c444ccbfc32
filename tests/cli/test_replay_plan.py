"""Which runs a replay makes, and how they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.small_audit import add_run, interrupt_run, make_audit
from trace_audit.cli.dry_run import kv_bytes_per_token
from trace_audit.cli.main import run
from trace_audit.cli.plan import PlannedRun, check_shuffles, plan_runs
from trace_audit.cli.run_names import base_name, free_name
from trace_audit.config import ParallelConfig
from trace_audit.config.kv_formats import KV_FORMATS, KVFormat
from trace_audit.errors import ConfigError, UsageError
from trace_audit.storage.audit_dir import AuditDir

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SDPA = CONFIGS / "bf16-sdpa.toml"
EAGER = CONFIGS / "bf16-eager.toml"


@pytest.fixture
def audit(tmp_path: Path) -> AuditDir:
    return make_audit(tmp_path / "audit")


def plan(
    audit: AuditDir,
    *paths: Path,
    sets: tuple[str, ...] = (),
    name: str | None = None,
    repeat: int = 1,
    force: bool = False,
) -> list[PlannedRun]:
    return plan_runs(audit, paths, sets, name=name, repeat=repeat, force=force)


def test_a_run_is_called_like_its_configuration(audit: AuditDir) -> None:
    assert [r.name for r in plan(audit, SDPA, EAGER)] == ["bf16-sdpa", "bf16-eager"]


def test_set_makes_a_run_a_combination_and_names_it(audit: AuditDir) -> None:
    runs = plan(audit, SDPA, sets=("block_size=16,32", "engine.dtype=float16"))
    assert [r.name for r in runs] == [
        "bf16-sdpa-block_size=16-dtype=float16",
        "bf16-sdpa-block_size=32-dtype=float16",
    ]
    assert [r.config.engine.block_size for r in runs] == [16, 32]
    assert {r.config.engine.dtype for r in runs} == {"float16"}


def test_set_applies_to_every_configuration(audit: AuditDir) -> None:
    runs = plan(audit, SDPA, EAGER, sets=("max_num_seqs=1,2",))
    assert len({r.name for r in runs}) == 4


def test_a_name_already_there_gets_a_number(audit: AuditDir) -> None:
    add_run(audit, "bf16-sdpa")
    assert [r.name for r in plan(audit, SDPA)] == ["bf16-sdpa-2"]
    add_run(audit, "bf16-sdpa-2")
    assert [r.name for r in plan(audit, SDPA)] == ["bf16-sdpa-3"]


def test_the_same_configuration_twice_makes_two_runs(audit: AuditDir) -> None:
    assert [r.name for r in plan(audit, SDPA, SDPA)] == ["bf16-sdpa", "bf16-sdpa-2"]


def test_force_takes_the_name(audit: AuditDir) -> None:
    add_run(audit, "bf16-sdpa")
    assert [r.name for r in plan(audit, SDPA, force=True)] == ["bf16-sdpa"]


def test_force_does_not_let_two_runs_of_one_command_replace_each_other(audit: AuditDir) -> None:
    with pytest.raises(UsageError, match="two of the runs"):
        plan(audit, SDPA, SDPA, force=True)


def test_an_interrupted_run_is_resumed_before_a_new_one_is_begun(audit: AuditDir) -> None:
    add_run(audit, "bf16-sdpa")
    interrupt_run(audit, "bf16-sdpa-2")
    assert [r.name for r in plan(audit, SDPA)] == ["bf16-sdpa-2"]


def test_a_run_that_another_process_writes_is_left_alone(audit: AuditDir) -> None:
    with audit.run_writer("bf16-sdpa", job_digest="job", num_shards=1, force=False):
        assert [r.name for r in plan(audit, SDPA)] == ["bf16-sdpa-2"]


def test_an_interrupted_later_number_comes_before_a_free_earlier_one() -> None:
    assert free_name("x", taken={"x"}, interrupted={"x-3"}, force=False) == "x-3"


def test_repeats_say_what_they_repeat(audit: AuditDir) -> None:
    runs = plan(audit, SDPA, repeat=3)
    assert [(r.name, r.repeat_of) for r in runs] == [
        ("bf16-sdpa", None),
        ("bf16-sdpa-repeat2", "bf16-sdpa"),
        ("bf16-sdpa-repeat3", "bf16-sdpa"),
    ]
    assert len({r.config for r in runs}) == 1


def test_batch_repeats_have_seeds_of_their_own(audit: AuditDir) -> None:
    sets = ("batch_order_seed=7",)
    runs = plan_runs(audit, [SDPA], sets, name="x", repeat=3, repeat_kinds=("batch",), force=False)
    assert [(r.name, r.repeat_of, r.repeat_kind) for r in runs[1:]] == [
        ("x-batch2", "x", "batch"),
        ("x-batch3", "x", "batch"),
    ]
    assert [r.config.engine.batch_order_seed for r in runs] == [7, 8, 9]
    plain = {r.config.model_copy(update={"engine": None}) for r in runs}
    assert len(plain) == 1


def test_the_last_seed_is_followed_by_the_first(audit: AuditDir) -> None:
    sets = ("batch_order_seed=2147483647",)
    runs = plan_runs(audit, [SDPA], sets, name="x", repeat=2, repeat_kinds=("batch",), force=False)
    assert runs[1].config.engine.batch_order_seed == 0


def test_every_kind_of_repeat_is_of_the_first_run(audit: AuditDir) -> None:
    kinds = ("rerun", "batch")
    runs = plan_runs(audit, [SDPA], (), name=None, repeat=2, repeat_kinds=kinds, force=False)
    assert [(r.name, r.repeat_of) for r in runs] == [
        ("bf16-sdpa", None),
        ("bf16-sdpa-repeat2", "bf16-sdpa"),
        ("bf16-sdpa-batch2", "bf16-sdpa"),
    ]


@pytest.mark.parametrize(("sets", "only"), [(("shard_size=1",), ()), ((), ("a",))])
def test_one_sequence_has_no_other_order(
    audit: AuditDir, sets: tuple[str, ...], only: tuple[str, ...]
) -> None:
    kinds = ("batch",)
    runs = plan_runs(audit, [SDPA], sets, name=None, repeat=2, repeat_kinds=kinds, force=False)
    with pytest.raises(UsageError, match="one sequence each"):
        check_shuffles(audit, runs, only)
    check_shuffles(audit, plan(audit, SDPA, sets=sets, repeat=2), only)
    check_shuffles(
        audit,
        plan_runs(audit, [SDPA], (), name=None, repeat=2, repeat_kinds=kinds, force=False),
        (),
    )


def test_a_kind_of_repeat_needs_repeats(
    audit: AuditDir, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(audit.path), "--config", str(SDPA), "--repeat-kind", "batch"]
    assert run(command) == 2
    assert "--repeat-kind has no effect without --repeat" in capsys.readouterr().err


def test_name_is_taken_as_it_is(audit: AuditDir) -> None:
    add_run(audit, "release-1")
    assert [r.name for r in plan(audit, SDPA, name="release-1")] == ["release-1"]


def test_name_is_for_one_run(audit: AuditDir) -> None:
    with pytest.raises(UsageError, match="--name x"):
        plan(audit, SDPA, EAGER, name="x")


@pytest.mark.parametrize("name", ["record", "imported", "a/b", ".hidden", "", "a b", "x" * 101])
def test_names_a_run_cannot_have(audit: AuditDir, name: str) -> None:
    with pytest.raises(ConfigError):
        plan(audit, SDPA, name=name)


def test_a_configuration_cannot_take_the_record_runs_place(audit: AuditDir) -> None:
    with pytest.raises(ConfigError, match="record"):
        plan(audit, SDPA, sets=("name=record",), force=True)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({}, "base"),
        ({"engine.enable_trace_replay": False}, "base-enable_trace_replay=false"),
        ({"engine.gpu_memory_utilization": 0.5}, "base-gpu_memory_utilization=0.5"),
        ({"name": "other", "engine.dtype": "float16"}, "other-dtype=float16"),
        ({"engine.dtype": "a/b\n"}, "base-dtype=a_b_"),
    ],
)
def test_names_are_readable_and_safe(overrides: dict[str, object], name: str) -> None:
    assert base_name("base", overrides) == name


def test_a_name_that_is_too_long_says_where_keys_can_go() -> None:
    with pytest.raises(ConfigError, match=r"has 111 characters, .* may have 100") as caught:
        base_name("base", {"engine.dtype": "x" * 100})
    assert "TOML file" in str(caught.value.hint)


def test_dry_run_tells_runs_tokens_and_kv_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    (model / "config.json").write_text(json.dumps({**shape, "hidden_size": 32}))
    audit = make_audit(tmp_path / "audit", model_path=str(model))
    command = ["replay", str(audit.path), "--config", str(SDPA), "--set", "dtype=bfloat16,float32"]
    assert run([*command, "--dry-run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 32 slots of 5 tokens take a block of 16 each; 3 layers, keys and values, 2 heads of width 8.
    elements = 32 * 16 * 3 * 2 * 2 * 8
    assert lines == [
        ["run", "sequences", "tokens", "ranks", "kv_bytes_per_rank"],
        ["bf16-sdpa-dtype=bfloat16", "2", "5", "1", str(2 * elements)],
        ["bf16-sdpa-dtype=float32", "2", "5", "1", str(4 * elements)],
    ]
    assert run([*command[:4], "--set", "path=prefill", "--dry-run"]) == 0
    # A pass holds one sequence, so the cache has one slot.
    kv_bytes = 2 * elements // 32
    line = capsys.readouterr().out.splitlines()[1].split()
    assert line == ["bf16-sdpa-path=prefill", "2", "5", "1", str(kv_bytes)]
    assert audit.run_names() == ["record"]


def test_dry_run_counts_what_only_selects(
    audit: AuditDir, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(audit.path), "--config", str(SDPA), "--only", "beta", "--dry-run"]
    assert run(command) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["bf16-sdpa", "1", "2", "1", "n/a"]


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}, 2 * 2 * 4 * 8),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 4}}, 8),
        ({"num_hidden_layers": 2}, None),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "kv_lora_rank": 3},
            None,
        ),
    ],
)
def test_kv_size_from_a_models_configuration(
    tmp_path: Path, config: dict[str, object], elements: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    one_byte = KVFormat(element_bytes=1)
    assert kv_bytes_per_token(tmp_path, ParallelConfig(), one_byte) == elements


@pytest.mark.parametrize(
    ("kv_cache_dtype", "bytes_per_head"),
    [
        ("float32", 64),
        ("bfloat16", 32),
        ("float16", 32),
        ("fp8_e4m3", 16),
        ("fp8_e5m2", 16),
        ("fp8_per_token_head", 20),
        ("int8", 20),
    ],
)
def test_kv_size_counts_the_scales(
    tmp_path: Path, kv_cache_dtype: str, bytes_per_head: int
) -> None:
    shape = {"num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "head_dim": 16}))
    parallel = ParallelConfig(tensor_parallel_size=8)
    got = kv_bytes_per_token(tmp_path, parallel, KV_FORMATS[kv_cache_dtype])
    assert got == 2 * 5 * bytes_per_head


@pytest.mark.parametrize(
    ("tensor", "pipeline", "layers", "kv_heads"),
    [
        (1, 1, 5, 4),
        (2, 1, 5, 2),
        (4, 1, 5, 1),
        (8, 1, 5, 1),  # replicated: no rank has less than a head
        (1, 2, 3, 4),  # stages of 3 and 2 layers
        (1, 3, 2, 4),
        (2, 2, 3, 2),
    ],
)
def test_kv_size_is_that_of_the_largest_rank(
    tmp_path: Path, tensor: int, pipeline: int, layers: int, kv_heads: int
) -> None:
    shape = {"num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "head_dim": 16}))
    parallel = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    got = kv_bytes_per_token(tmp_path, parallel, KVFormat(element_bytes=4))
    assert got == 4 * 2 * layers * kv_heads * 16


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["fused=true", "compile=true"], "fused = true replaces"),
        (["fused=true", "quantization=int8_weight_only"], "fused = true replaces"),
        (["fused=true", "tensor_parallel_size=2"], "fused = true merges"),
        (["speculative.method=ngram", "path=prefill"], "method"),
        (["speculative.method=ngram", "prompt_lookup_min=9"], "prompt_lookup_min"),
    ],
)
def test_dry_run_refuses_what_a_run_would(
    audit: AuditDir, capsys: pytest.CaptureFixture[str], keys: list[str], message: str
) -> None:
    sets = [part for key in keys for part in ("--set", key)]
    assert run(["replay", str(audit.path), "--config", str(SDPA), *sets, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_tells_the_ranks_of_a_run(
    audit: AuditDir, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(CONFIGS / "bf16-tp2pp2.toml")
    assert run(["replay", str(audit.path), "--config", config, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[3] == "4"


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        (["--only", "alpa"], "'alpa' is no sequence", "'alpha'"),
        (["--model", "x", "--model-path", "y"], "exclude each other", "moved"),
        (["--model", ""], "--model is empty", "leave the option out"),
        (["--repeat", "0"], "--repeat", "--help"),
        (["--set", "dtpye=x"], "unknown key dtpye", "did you mean dtype?"),
        (["--name", "record"], "cannot be called record", "--name"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    audit: AuditDir,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
    hint: str,
) -> None:
    assert run(["replay", str(audit.path), "--config", str(SDPA), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error, hinted = captured.err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert hinted.startswith("hint: ")
    assert hint in hinted
