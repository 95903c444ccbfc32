"""Which part of every parameter a rank holds, and what cannot be split."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import tiny_config
from trace_audit.errors import ConfigError, ModelError
from trace_audit.models.split import empty_model
from trace_audit.parallel.plan import Part, TensorPlan, tensor_plan

SPLIT_FAMILIES = ["llama", "llama-tied", "qwen3", "qwen3-moe", "mixtral", "phi3", "olmo2", "gemma3"]


def plan_of(family: str, size: int) -> tuple[TensorPlan, dict[str, torch.Size]]:
    config = tiny_config(family)
    model = empty_model(config, torch.float32, "eager")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return tensor_plan(model, config, size), shapes


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_the_parts_of_all_ranks_make_up_every_parameter(family, size):
    plan, shapes = plan_of(family, size)
    num_split = 0
    for name, shape in shapes.items():
        numbers = torch.arange(shape.numel()).reshape(shape)
        parts = [plan.part(name, shape, rank) for rank in range(size)]
        if parts[0] is None:
            assert parts == [None] * size
            continue
        num_split += 1
        held = torch.cat([p.of(numbers).flatten() for p in parts])
        assert set(held.tolist()) == set(range(shape.numel()))
        copies = held.numel() // shape.numel()
        # Only keys and values are held twice, where there are more ranks than heads of them.
        module = name.rpartition(".")[0]
        is_kv = plan.styles.get(module) == "colwise" and module.endswith(("k_proj", "v_proj"))
        assert copies == (2 if size == 4 and is_kv else 1)
    assert num_split > 0


def test_columns_rows_packed_blocks_and_experts():
    plan, shapes = plan_of("qwen3-moe", 2)
    layer = "model.layers.0"

    def part(name: str) -> Part | None:
        return plan.part(f"{layer}.{name}", shapes[f"{layer}.{name}"], 1)

    assert part("self_attn.q_proj.weight") == Part(dim=0, ranges=((32, 64),))
    assert part("self_attn.o_proj.weight") == Part(dim=1, ranges=((32, 64),))
    assert part("mlp.experts.gate_up_proj") == Part(dim=1, ranges=((32, 64), (96, 128)))
    assert part("mlp.experts.down_proj") == Part(dim=2, ranges=((32, 64),))
    assert part("mlp.gate.weight") is None
    assert part("self_attn.q_norm.weight") is None
    assert plan.part("lm_head.weight", (512, 64), 1) == Part(dim=0, ranges=((256, 512),))


def test_more_ranks_than_kv_heads_hold_the_head_of_their_queries():
    plan, _ = plan_of("llama", 4)
    name = "model.layers.0.self_attn.k_proj.weight"
    starts = [plan.part(name, (32, 64), rank).ranges for rank in range(4)]
    assert starts == [((0, 16),), ((0, 16),), ((16, 32),), ((16, 32),)]


def test_a_bias_goes_with_its_rows_and_a_row_parallel_one_stays_whole():
    plan, _ = plan_of("llama", 2)
    assert plan.part("model.layers.0.self_attn.q_proj.bias", (64,), 1) == Part(
        dim=0, ranges=((32, 64),)
    )
    assert plan.part("model.layers.0.self_attn.o_proj.bias", (64,), 1) is None


def test_a_vocabulary_that_does_not_divide_leaves_the_last_rank_fewer_rows():
    plan, _ = plan_of("llama-9h", 3)
    assert [plan.vocabulary_range(rank) for rank in range(3)] == [(0, 171), (171, 342), (342, 512)]


def test_nine_heads_over_two_ranks_are_refused_with_the_sizes_that_work():
    with pytest.raises(ConfigError, match="num_attention_heads = 9 cannot be split over") as error:
        plan_of("llama-9h", 2)
    assert error.value.hint == "sizes that work: 1, 3"


def test_columns_that_do_not_divide_are_named():
    config = tiny_config("llama")
    config.intermediate_size = 95
    with pytest.raises(ConfigError, match=r"95 columns of model\.layers\.0\.mlp") as error:
        tensor_plan(empty_model(config, torch.float32, "eager"), config, 2)
    assert error.value.hint == "sizes that work: 1"


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(ModelError, match="StableLmForCausalLM has no tensor-parallel plan"):
        plan_of("stablelm", 2)


def test_a_style_that_is_not_known_is_refused_by_name():
    config = tiny_config("llama")
    config.base_model_tp_plan = {"layers.*.mlp.down_proj": "sequence_parallel"}
    with pytest.raises(ModelError, match="sequence_parallel"):
        tensor_plan(empty_model(config, torch.float32, "eager"), config, 2)


def test_a_plan_that_splits_no_layer_is_refused():
    config = tiny_config("llama")
    config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise"}
    with pytest.raises(ModelError, match="splits none of its layers"):
        tensor_plan(empty_model(config, torch.float32, "eager"), config, 2)
