"""The files in configs/: whole, commented, and what their names say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from trace_audit.config import RunConfig, default_record_config, load_config
from trace_audit.config.model import SECTIONS

DIRECTORY = Path(__file__).parent.parent / "configs"
CONFIGS = sorted(DIRECTORY.glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_named_configurations_are_whole_and_called_like_their_file(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    assert set(written) == set(RunConfig.model_fields)
    for table, section in SECTIONS.items():
        assert set(written[table]) == set(section.model_fields), table


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_a_named_configuration_is_commented(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assignments = [line for line in lines if not line.startswith("#") and " = " in line]
    assert [line for line in assignments if "  # " not in line] == []
    assert [line for line in lines if len(line) > 100] == []


def test_the_named_configurations_are_there() -> None:
    assert {path.stem for path in CONFIGS} == {
        "fp32-eager",
        "fp32-triton",
        "bf16-eager",
        "bf16-sdpa",
        "bf16-triton",
        "fp16-sdpa",
        "bf16-fp32head",
        "bf16-prefill",
        "bf16-spec-ngram",
        "bf16-fixed-batch",
        "batch1",
        "bf16-tp2",
        "bf16-tp4-emulated",
        "bf16-tp8-emulated",
        "fp32-tp3",
        "bf16-pp2",
        "bf16-tp2pp2",
        "bf16-kv-fp8",
        "bf16-kv-int8",
        "bf16-w8",
        "bf16-w4",
        "bf16-fp8",
        "bf16-compiled",
        "bf16-fused",
    }


@pytest.mark.parametrize(
    ("name", "sizes", "backend"),
    [
        ("bf16-sdpa", (1, 1), "auto"),
        ("bf16-tp2", (2, 1), "process"),
        ("bf16-tp4-emulated", (4, 1), "emulated"),
        ("bf16-tp8-emulated", (8, 1), "emulated"),
        ("fp32-tp3", (3, 1), "process"),
        ("bf16-pp2", (1, 2), "process"),
        ("bf16-tp2pp2", (2, 2), "process"),
    ],
)
def test_parallel_configurations_are_what_their_name_says(
    name: str, sizes: tuple[int, int], backend: str
) -> None:
    config = load_config(DIRECTORY / f"{name}.toml")
    parallel = config.parallel
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == sizes
    assert parallel.backend == backend
    assert config.engine.dtype == ("float32" if name.startswith("fp32") else "bfloat16")


@pytest.mark.parametrize(
    ("name", "counterpart"),
    [
        ("bf16-tp2", "bf16-sdpa"),
        ("bf16-tp4-emulated", "bf16-sdpa"),
        ("bf16-tp8-emulated", "bf16-sdpa"),
        ("fp32-tp3", "fp32-eager"),
        ("bf16-pp2", "bf16-sdpa"),
        ("bf16-tp2pp2", "bf16-tp2"),
    ],
)
def test_parallel_configurations_change_nothing_else(name: str, counterpart: str) -> None:
    configs = [load_config(DIRECTORY / f"{n}.toml") for n in (name, counterpart)]
    assert configs[0].engine == configs[1].engine
    text = (DIRECTORY / f"{name}.toml").read_text(encoding="utf-8")
    assert f"gainst {counterpart}" in text or f"gainst an {counterpart}" in text


@pytest.mark.parametrize(
    ("name", "stored"), [("bf16-kv-fp8", "fp8_e4m3"), ("bf16-kv-int8", "int8")]
)
def test_kv_cache_configurations_change_nothing_else(name: str, stored: str) -> None:
    config = load_config(DIRECTORY / f"{name}.toml")
    counterpart = load_config(DIRECTORY / "bf16-sdpa.toml")
    assert config.engine.kv_cache_dtype == stored
    assert config.engine.model_copy(update={"kv_cache_dtype": "auto"}) == counterpart.engine
    assert config.parallel == counterpart.parallel


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("bf16-w8", {"quantization": "int8_weight_only"}),
        ("bf16-w4", {"quantization": "int4_weight_only"}),
        ("bf16-fp8", {"quantization": "fp8"}),
        ("bf16-compiled", {"compile": True}),
        ("bf16-fused", {"fused": True}),
    ],
)
def test_weights_configurations_change_nothing_else(name: str, changed: dict[str, object]) -> None:
    config = load_config(DIRECTORY / f"{name}.toml")
    counterpart = load_config(DIRECTORY / "bf16-sdpa.toml")
    assert config.engine == counterpart.engine.model_copy(update=changed)
    assert config.parallel == counterpart.parallel


def test_bf16_prefill_is_bf16_sdpa_in_one_pass() -> None:
    ours, theirs = (load_config(DIRECTORY / f"{n}.toml") for n in ("bf16-prefill", "bf16-sdpa"))
    assert ours.engine == theirs.engine.model_copy(update={"path": "prefill"})
    assert ours.parallel == theirs.parallel


def test_fp32_eager_computes_what_record_does_by_default() -> None:
    config = load_config(DIRECTORY / "fp32-eager.toml")
    assert config.engine == default_record_config().engine
    assert config.parallel == default_record_config().parallel


def test_bf16_spec_ngram_is_bf16_sdpa_with_drafts() -> None:
    config, counterpart = (
        load_config(DIRECTORY / f"{name}.toml") for name in ("bf16-spec-ngram", "bf16-sdpa")
    )
    assert config.speculative.method == "ngram"
    changed = {"name": config.name, "speculative": config.speculative}
    assert counterpart.model_copy(update=changed) == config
