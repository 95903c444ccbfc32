"""A split model is the whole model: its weights, its buffers, its logprobs, its refusals."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parallel.emulated import emulated, emulated_harness
from tests.tiny import Harness, differing_columns, random_prompts, save_tiny, tiny_config
from trace_audit.config import ParallelConfig
from trace_audit.errors import ConfigError, ModelError
from trace_audit.models import split_check
from trace_audit.models.loader import load_model
from trace_audit.models.split import load_split_model
from trace_audit.models.split_check import check_split
from trace_audit.parallel.pipeline import stage_layers
from trace_audit.parallel.world import single_world

FAMILIES = ["llama-tied", "qwen3", "gemma3", "granite", "qwen3-moe", "mixtral", "phi3", "olmo2"]
CPU = torch.device("cpu")
LENGTHS = [3, 9, 31, 17]
FLOAT32 = {"dtype": torch.float32, "device": CPU, "lm_head_dtype": torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_ranks_give_the_logprobs_of_one(checkpoint, device, family):
    prompts = random_prompts(LENGTHS)
    whole = Harness.make(checkpoint(family), device).record(prompts)
    for size in (2, 4):
        with emulated_harness(checkpoint(family), device, emulated(size)) as harness:
            split = harness.replay(prompts, whole)
        worst = max(np.abs(a.logprob - b.logprob).max() for a, b in zip(whole, split, strict=True))
        assert worst < 5e-5


def test_a_rank_with_some_of_the_heads_splits_contexts_as_one_with_all(
    checkpoint, device, monkeypatch
):
    asked = []

    def keep(max_rows, num_kv_heads):
        asked.append((max_rows, num_kv_heads))
        return 256

    monkeypatch.setattr("trace_audit.engine.build.split_length", keep)
    monkeypatch.setattr("trace_audit.engine.build.can_run_triton", lambda device: True)
    Harness.make(checkpoint(), device, attention_backend="triton")
    with emulated_harness(checkpoint(), device, emulated(2), attention_backend="triton"):
        pass
    assert len(set(asked)) == 1
    assert len(asked) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "stablelm"])
def test_pipeline_stages_change_no_bit(checkpoint, device, family, dtype):
    prompts = random_prompts(LENGTHS)
    whole = Harness.make(checkpoint(family), device, dtype).record(prompts, 6)
    for stages in (2, 3):
        parallel = emulated(1, stages)
        with emulated_harness(checkpoint(family), device, parallel, dtype) as harness:
            assert differing_columns(whole, harness.record(prompts, 6)) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_of_tensor_parallel_ranks_change_no_bit(checkpoint, device, dtype):
    prompts = random_prompts(LENGTHS)
    outputs = []
    for stages in (1, 2):
        with emulated_harness(checkpoint(), device, emulated(2, stages), dtype) as harness:
            outputs.append(harness.record(prompts))
    assert differing_columns(*outputs) == set()


def test_one_shard_is_the_whole_model_bit_for_bit(checkpoint, device):
    prompts = random_prompts(LENGTHS)
    whole = Harness.make(checkpoint(), device, torch.bfloat16).record(prompts)
    with emulated_harness(checkpoint(), device, emulated(), torch.bfloat16) as harness:
        assert differing_columns(whole, harness.record(prompts)) == set()


def test_the_order_of_the_sum_moves_bits_at_four_ranks_and_none_at_two(checkpoint, device):
    prompts = random_prompts(LENGTHS)
    whole = Harness.make(checkpoint("llama-8kv"), device, torch.bfloat16).record(prompts)

    def replayed(size: int, **changes: str):
        parallel = emulated(size, **changes)
        with emulated_harness(checkpoint("llama-8kv"), device, parallel, torch.bfloat16) as harness:
            return harness.replay(prompts, whole)

    others = [{"reduction": "ring"}, {"reduction": "tree"}, {"reduction_dtype": "float32"}]
    for size, moved in ((2, False), (4, True)):
        in_order = replayed(size)
        for change in others:
            assert bool(differing_columns(in_order, replayed(size, **change))) is moved


def test_preemption_and_stop_strings_work_on_every_rank(checkpoint, device):
    prompts = random_prompts([20, 30, 25, 18])
    with emulated_harness(checkpoint(), device, emulated(2)) as ample:
        expected = ample.record(prompts, 40)
    with emulated_harness(checkpoint(), device, emulated(2, 2), num_kv_blocks=20) as tight:
        outputs = tight.replay(prompts, expected)
        assert tight.built.engine.counters.preemptions > 0
        assert tight.built.num_kv_blocks == 20
    for a, b in zip(expected, outputs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.abs(a.logprob - b.logprob).max() < 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "stablelm"])
def test_sliced_reading_gives_what_transformers_loads(checkpoint, family):
    whole = load_model(checkpoint(family), **FLOAT32)
    sliced = load_split_model(checkpoint(family), world=single_world(), **FLOAT32)
    assert (whole.weights, sliced.weights) == ("whole", "sliced")
    # Names differ by the wrappers around shards.
    ours = {n.replace("shard.", ""): t for n, t in state_of(sliced.model).items()}
    theirs = state_of(whole.model)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype, name
        assert torch.equal(tensor, ours[name]), name


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers, those that no checkpoint holds included."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_a_rank_reads_its_share_of_the_bytes(checkpoint, monkeypatch):
    from trace_audit.models.weights import SlicedWeights

    read = SlicedWeights._read
    counted: list[int] = []

    def counting(self, name, part):
        tensor = read(self, name, part)
        counted.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(SlicedWeights, "_read", counting)
    with emulated_harness(checkpoint(), CPU, emulated(2)):
        pass
    total = sum(t.nbytes for t in load_file(checkpoint() / "model.safetensors").values())
    norms = 9 * 64 * 4  # two a layer and the last, on both ranks
    assert sum(counted) == total + norms


@pytest.fixture
def directory(checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint(), tmp_path / "model"))


def edit(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "other shapes"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_as_for_one_rank(directory, change, message):
    edit(directory, change)
    with pytest.raises(ModelError, match=message):
        load_split_model(directory, world=single_world(), **FLOAT32)


def test_a_truncated_file_is_refused(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="damaged"):
        load_split_model(directory, world=single_world(), **FLOAT32)


def test_old_checkpoints_may_hold_rotary_frequencies(directory):
    edit(
        directory,
        lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    loaded = load_split_model(directory, world=single_world(), **FLOAT32)
    assert loaded.weights == "sliced"


def test_several_files_are_read_by_their_index(tmp_path):
    from transformers import AutoModelForCausalLM

    one = save_tiny(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(one).save_pretrained(
        tmp_path / "two", max_shard_size="200KB"
    )
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 1
    loaded = load_split_model(tmp_path / "two", world=single_world(), **FLOAT32)
    assert loaded.weights == "sliced"
    for name, tensor in state_of(
        load_split_model(one, world=single_world(), **FLOAT32).model
    ).items():
        assert torch.equal(tensor, state_of(loaded.model)[name])


@pytest.mark.parametrize(("layers", "stages"), [(4, 1), (4, 2), (5, 2), (7, 3), (4, 4)])
def test_stages_are_contiguous_and_even(layers, stages):
    parts = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [i for part in parts for i in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 5 is more than the model's 4"):
        check_split(tiny_config("llama"), emulated(1, 5))


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "llama-9h"])
def test_families_pass_the_check_that_comes_before_the_weights(family):
    check_split(tiny_config(family), emulated(3 if family == "llama-9h" else 4, 2))


def test_a_model_without_a_plan_can_be_cut_into_stages(checkpoint):
    check_split(tiny_config("stablelm"), emulated(1, 2))
    with pytest.raises(ModelError, match="no tensor-parallel plan"):
        check_split(tiny_config("stablelm"), emulated(2, 1))


@pytest.mark.parametrize(
    ("module", "style", "message"),
    [
        # Other columns than the gate's are multiplied with it.
        ("up_proj", "packed_colwise", "differs by"),
        # A rank's columns meet weights for all of them.
        ("down_proj", "colwise", "cannot be run split"),
    ],
)
def test_a_plan_that_does_not_fit_its_architecture_is_caught(module, style, message):
    config = tiny_config("llama")
    config.base_model_tp_plan = copy.deepcopy(config.base_model_tp_plan)
    config.base_model_tp_plan[f"layers.*.mlp.{module}"] = style
    with pytest.raises(ModelError, match=message):
        check_split(config, emulated(2))


def test_one_rank_needs_no_check(monkeypatch):
    monkeypatch.setattr(split_check, "_difference_of_tiny_model", None)
    check_split(tiny_config("llama"), ParallelConfig())
