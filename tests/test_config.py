"""Configuration: what is accepted, and what is refused and how."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from trace_audit.config import (
    ParallelConfig,
    RunConfig,
    default_record_config,
    flat,
    keys,
    load_config,
    override,
    parse_set,
)
from trace_audit.errors import ConfigError


def load_text(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def refusal(tmp_path: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    return caught.value


def test_unknown_key_offers_the_nearest(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'name = "x"\n[engine]\ndtpye = "float16"\n')
    assert "engine.dtpye" in error.message
    assert error.hint == "did you mean dtype?"


def test_a_typo_in_a_required_key_is_told_as_a_typo(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'nmae = "x"\n')
    assert "unknown key nmae" in error.message
    assert error.hint == "did you mean name?"


def test_an_engine_key_outside_its_table_is_sent_there(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'name = "x"\ndtype = "float16"\n')
    assert error.hint == "dtype belongs under [engine]"


@pytest.mark.parametrize("where", ["", "[engine]\n"])
@pytest.mark.parametrize("key", ["tensor_parallel_size", "reduction", "backend"])
def test_a_parallel_key_outside_its_table_is_sent_there(
    tmp_path: Path, key: str, where: str
) -> None:
    error = refusal(tmp_path, f'name = "x"\n{where}{key} = 2\n')
    assert f"unknown key {'engine.' if where else ''}{key}" in error.message
    assert error.hint == f"{key} belongs under [parallel]"


def test_an_engine_key_in_the_parallel_table_is_sent_to_its_own(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'name = "x"\n[parallel]\nnum_threads = 2\n')
    assert "unknown key parallel.num_threads" in error.message
    assert error.hint == "num_threads belongs under [engine]"


def test_a_typo_in_the_parallel_table_offers_its_keys(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'name = "x"\n[parallel]\ntensor_paralel_size = 2\n')
    assert error.hint == "did you mean tensor_parallel_size?"


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("tensor_parallel_size = 0", "at least 1", None),
        ("pipeline_parallel_size = 1.5", "a whole number", None),
        ("timeout_seconds = 0", "at least 1", None),
        ('backend = "processes"', "auto, single, process, emulated", "did you mean process?"),
        ('reduction = "rank-order"', "ring, tree", "did you mean rank_order?"),
        ('reduction_dtype = "float16"', "model, float32", None),
    ],
)
def test_bad_parallel_values_are_refused_by_key_and_value(
    tmp_path: Path, line: str, said: str, hint: str | None
) -> None:
    error = refusal(tmp_path, f'name = "x"\n[parallel]\n{line}\n')
    assert f"parallel.{line.split()[0]} = " in error.message
    assert said in error.message
    if hint is not None:
        assert error.hint == hint


def test_a_table_given_as_a_value_is_refused(tmp_path: Path) -> None:
    assert "it must be a table" in refusal(tmp_path, 'name = "x"\nparallel = 2\n').message


def test_unknown_table_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'name = "x"\n[engin]\ndtype = "float16"\n')
    assert "unknown key engin" in error.message
    assert error.hint == "did you mean engine?"


def test_bad_choice_names_key_value_and_choices(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'name = "x"\n[engine]\ndtype = "bfloat61"\n')
    assert "engine.dtype = 'bfloat61'" in error.message
    assert "float32, bfloat16, float16" in error.message
    assert error.hint == "did you mean bfloat16?"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_num_seqs = 0", "at least 1"),
        ("max_num_seqs = -3", "at least 1"),
        ("max_num_seqs = true", "a whole number"),
        ("max_num_seqs = 3.5", "a whole number"),
        ('max_num_seqs = "3"', "a whole number"),
        ("max_num_seqs = 99999999999", "at most 2147483647"),
        ("num_kv_blocks = -1", "at least 0"),
        ("block_size = 24", "a power of two"),
        ("block_size = 0", "at least 1"),
        ("gpu_memory_utilization = 0.0", "more than 0"),
        ("gpu_memory_utilization = 1.5", "at most 1"),
        ("gpu_memory_utilization = nan", "a finite number"),
        ("gpu_memory_utilization = true", "a number"),
        ("enable_trace_replay = 1", "true or false"),
        ("dtype = 16", "is not one of float32"),
    ],
)
def test_bad_values_are_refused_by_key_and_value(tmp_path: Path, line: str, said: str) -> None:
    error = refusal(tmp_path, f'name = "x"\n[engine]\n{line}\n')
    assert f"engine.{line.split()[0]} = " in error.message
    assert said in error.message


@pytest.mark.parametrize(
    "name", ["", ".hidden", "a/b", "a b", "../x", "a\nb", "\u202ea", "-x", "x" * 101]
)
def test_names_that_are_no_directory_names_are_refused(tmp_path: Path, name: str) -> None:
    escaped = name.encode("unicode_escape").decode()
    assert "name = " in refusal(tmp_path, f'name = "{escaped}"\n').message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name = ", "is not valid TOML"),
        (b"name = 'x'\nname = 'y'\n", "line 2"),
        (b"\xff\xfe", "is not valid UTF-8"),
        (b"", "the key name is missing"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_path_that_is_no_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / name)
    assert str(tmp_path / name) in caught.value.message


def test_configurations_cannot_be_changed() -> None:
    config = default_record_config()
    with pytest.raises(ValidationError):
        config.name = "other"
    with pytest.raises(ValidationError):
        config.engine.dtype = "float16"


def test_configurations_cross_process_boundaries() -> None:
    config = default_record_config()
    assert pickle.loads(pickle.dumps(config)) == config


def test_override_replaces_only_what_it_names() -> None:
    before = default_record_config()
    after = override(before, {"engine.dtype": "bfloat16", "engine.max_num_seqs": 4})
    changed = {key for key, value in flat(after).items() if value != flat(before)[key]}
    assert changed == {"engine.dtype", "engine.max_num_seqs"}
    assert before == default_record_config()


@pytest.mark.parametrize("key", ["dtype", "engine.dtpye", "engine", "engine.dtype.x"])
def test_override_refuses_unknown_keys(key: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        override(default_record_config(), {key: "float32"})


def test_flat_has_every_key_once() -> None:
    assert list(flat(default_record_config())) == keys()


def test_set_gives_the_cross_product_in_order() -> None:
    assert parse_set(["dtype=float32,bfloat16", "engine.block_size=16,32"]) == [
        {"engine.dtype": "float32", "engine.block_size": 16},
        {"engine.dtype": "float32", "engine.block_size": 32},
        {"engine.dtype": "bfloat16", "engine.block_size": 16},
        {"engine.dtype": "bfloat16", "engine.block_size": 32},
    ]


def test_set_takes_parallel_keys_by_their_bare_names() -> None:
    assert parse_set(["tensor_parallel_size=1,2", "backend=emulated"]) == [
        {"parallel.tensor_parallel_size": 1, "parallel.backend": "emulated"},
        {"parallel.tensor_parallel_size": 2, "parallel.backend": "emulated"},
    ]
    config = override(default_record_config(), {"parallel.tensor_parallel_size": 2})
    assert config.parallel == ParallelConfig(tensor_parallel_size=2)


def test_no_set_is_one_run_without_changes() -> None:
    assert parse_set([]) == [{}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("enable_trace_replay=false", False),
        ("max_num_seqs=4", 4),
        ("gpu_memory_utilization=0.5", 0.5),
        ("dtype=bfloat16", "bfloat16"),
        ('dtype="bfloat16"', "bfloat16"),
        ("dtype = bfloat16 ", "bfloat16"),
        ("name=2026-10-01", "2026-10-01"),
        ("name=a=b", "a=b"),
        ("name=[x]", "[x]"),
    ],
)
def test_set_reads_toml_scalars_and_else_strings(text: str, value: object) -> None:
    (overrides,) = parse_set([text])
    (parsed,) = overrides.values()
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["dtype"], "is not KEY=VALUE"),
        (["dtpye=float32"], "unknown key dtpye"),
        (["engine.dtpye=float32"], "unknown key engine.dtpye"),
        (["=float32"], "unknown key"),
        (["dtype="], "empty value"),
        (["dtype=float32,"], "empty value"),
        (["dtype=float32,float32"], "twice"),
        (["dtype=float32", "engine.dtype=float16"], "twice"),
    ],
)
def test_set_refuses(values: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_set(values)


def test_set_offers_the_nearest_key() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_set(["dtpye=float32"])
    assert caught.value.hint == "did you mean dtype?"


def test_defaults_are_finite() -> None:
    numbers = [v for v in flat(default_record_config()).values() if isinstance(v, float)]
    assert numbers
    assert all(math.isfinite(number) for number in numbers)
