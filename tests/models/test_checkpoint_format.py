"""Checkpoints that were quantized elsewhere: read with their library, refused without."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.commands import run, run_info, write_config
from tests.tiny import Harness, engine_config, random_prompts, save_tokenizer
from trace_audit.engine.build import build_engine
from trace_audit.errors import ConfigError, ModelError
from trace_audit.models.checkpoint_format import checkpoint_format, running
from trace_audit.models.loader import load_model
from trace_audit.models.pretrained import read_config
from trace_audit.models.quantization_check import check_quantization

CPU = torch.device("cpu")
HAS_TORCHAO = find_spec("torchao") is not None


def save_torchao(directory: Path, plain: Path) -> Path:
    """An 8-bit copy of a checkpoint, as transformers writes it."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.float32
    )
    model.save_pretrained(directory)
    return directory


def claimed(directory: Path, plain: Path, quantization_config: dict) -> Path:
    """A plain checkpoint whose config.json says that it is quantized."""
    shutil.copytree(plain, directory)
    path = directory / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": quantization_config}
    path.write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq (bits 4, group_size 128)"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8 (fmt e4m3)"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
            },
            "torchao (Int8WeightOnlyConfig)",
        ),
    ],
)
def test_a_checkpoint_is_told_by_its_method_and_its_numbers(given, told):
    assert checkpoint_format(LlamaConfig(quantization_config=given)) == told


def test_without_its_library_a_checkpoint_is_refused_by_name(checkpoint, tmp_path):
    directory = claimed(
        tmp_path / "claimed", checkpoint(), {"quant_method": "gptq", "bits": 4, "group_size": 32}
    )
    with pytest.raises(ModelError, match="transformers cannot load") as caught:
        load_model(directory, dtype=torch.float32, device=CPU, lm_head_dtype=torch.float32)
    assert "gptq (bits 4, group_size 32): install its library" in str(caught.value.hint)


def test_a_quantized_checkpoint_is_not_quantized_again(checkpoint, tmp_path):
    directory = claimed(tmp_path / "claimed", checkpoint(), {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"quantized already \(gptq \(bits 4\)\)"):
        check_quantization(read_config(directory), "fp8")


def test_layers_that_fail_are_refused_with_what_their_library_said():
    with (
        pytest.raises(
            ModelError, match=r"gptq \(bits 4\), cannot be computed in bfloat16 on cpu: no"
        ),
        running("gptq (bits 4)", torch.bfloat16, CPU),
    ):
        raise RuntimeError("no kernel\nmore")
    with pytest.raises(RuntimeError), running(None, torch.bfloat16, CPU):
        raise RuntimeError("a bug of our own")


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_torchao_checkpoint_is_the_model_that_quantization_makes(checkpoint, tmp_path, dtype):
    theirs = save_torchao(tmp_path / "torchao", checkpoint())
    name = str(dtype).removeprefix("torch.")
    config = engine_config(dtype=name, lm_head_dtype=name)
    rows = []
    for directory, quantization in ((theirs, "none"), (checkpoint(), "int8_weight_only")):
        loaded = load_model(
            directory, dtype=dtype, device=CPU, lm_head_dtype=dtype, quantization=quantization
        )
        harness = Harness.around(loaded, build_engine(loaded, config))
        rows.append(harness.record(random_prompts([5, 12]), 1))
    assert harness.built.backends["checkpoint"] == "plain"
    # The same integers and scales; products are scaled after they are summed, or before.
    bound = 1e-4 if dtype == torch.float32 else 0.2
    for a, b in zip(*rows, strict=True):
        assert abs(a.logsumexp - b.logsumexp).max() < bound


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_a_replay_on_a_torchao_checkpoint_is_told_apart(audit, model, tmp_path):
    other = save_tokenizer(save_torchao(tmp_path / "torchao", model))
    config = write_config(tmp_path / "e.toml", "e", attention_backend="eager")
    run("replay", audit, "--config", config, "--model", other)
    backends = run_info(audit, "e")["backends"]
    assert backends["checkpoint"] == "torchao (Int8WeightOnlyConfig)"
    assert backends["quantization"] == "none"
    done = run("diff", "report", audit, "--format", "json")
    told = json.loads(done.stdout)["pairs"][0]["warnings"]
    assert (
        "the candidate is another checkpoint than the baseline: torchao (Int8WeightOnlyConfig), "
        "and the baseline's plain"
    ) in told
    done = run(
        "replay", audit, "--config", config, "--model", other, "--set", "quantization=fp8", code=2
    )
    assert "quantized already" in done.stderr
    done = run(
        "replay", audit, "--config", config, "--model", other, "--set", "tensor_parallel_size=2",
        "--set", "parallel.backend=emulated", code=2,
    )  # fmt: skip
    assert "only plain ones can be split" in done.stderr
