"""What a model directory must be, and the sentence that says why it is not."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, GptOssConfig, LlamaConfig

from tests.tiny import (
    COMMON,
    Harness,
    differing_columns,
    random_prompts,
    save_tiny,
    tiny_config,
)
from trace_audit.errors import ModelError
from trace_audit.models.conformance import TOLERANCE, check_architecture
from trace_audit.models.loader import load_model
from trace_audit.models.packed_linear import PackedLinear, can_pack, pack_linears
from trace_audit.models.pretrained import read_config

CPU = torch.device("cpu")


def load(directory: Path, dtype: torch.dtype = torch.float32, **changes):
    return load_model(directory, dtype=dtype, device=CPU, lm_head_dtype=dtype, **changes)


@pytest.fixture
def directory(checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint(), tmp_path / "model"))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, edit) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def refused(directory: Path, message: str) -> ModelError:
    with pytest.raises(ModelError, match=message) as error:
        load(directory)
    assert "\n" not in error.value.message
    return error.value


def test_a_missing_directory(tmp_path):
    refused(tmp_path / "nowhere", "does not exist")


def test_a_directory_without_config(directory):
    (directory / "config.json").unlink()
    refused(directory, "no config.json")


@pytest.mark.parametrize("text", ["{", "[]", "", "{'a': 1}"])
def test_a_broken_config(directory, text):
    (directory / "config.json").write_text(text)
    refused(directory, "config.json")


def test_an_unknown_architecture(directory):
    edit_config(directory, model_type="no_such_model")
    refused(directory, "does not accept")


def test_a_model_that_needs_remote_code(directory):
    edit_config(directory, auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    refused(directory, "needs code of its own")


def test_a_directory_without_weights(directory):
    (directory / "model.safetensors").unlink()
    refused(directory, "no \\*.safetensors")


def test_pickled_weights_alone_are_never_opened(directory):
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"not even a pickle")
    error = refused(directory, "pickled weights only")
    assert "safetensors" in (error.hint or "")


def test_a_missing_weight_is_named(directory):
    edit_weights(directory, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    refused(directory, r"lacks model\.layers\.1\.mlp\.up_proj\.weight")


def test_an_extra_weight_is_named(directory):
    edit_weights(directory, lambda w: w.update({"model.extra.weight": torch.zeros(2)}))
    refused(directory, r"unexpected model\.extra\.weight")


def test_a_weight_of_another_shape_is_named(directory):
    edit_weights(
        directory, lambda w: w.update({"model.norm.weight": torch.zeros(COMMON["hidden_size"] + 1)})
    )
    refused(directory, r"other shapes .*model\.norm\.weight")


def test_a_truncated_weights_file(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(directory, "model")


def test_a_garbage_weights_file(directory):
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)
    refused(directory, "model")


def test_an_architecture_without_the_attention_interface():
    with pytest.raises(ModelError, match="attention interface"):
        check_architecture(BloomConfig())


def test_attention_sinks_are_refused_by_name():
    with pytest.raises(ModelError, match="s_aux"):
        check_architecture(GptOssConfig())


def test_unknown_layer_types_are_refused_by_name(directory):
    edit_config(
        directory,
        model_type="qwen3",
        layer_types=["full_attention", "linear_attention"],
        num_hidden_layers=2,
    )
    with pytest.raises(ModelError, match="linear_attention"):
        read_config(directory)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_supported_families_conform(family):
    assert check_architecture(tiny_config(family)) < TOLERANCE / 10


def test_a_window_that_is_off_by_one_does_not_conform(monkeypatch):
    from trace_audit.attention import base, eager

    def off_by_one(positions, context_len, window):
        return base.visible(positions, context_len, None if window is None else window + 1)

    monkeypatch.setattr(eager, "visible", off_by_one)
    with pytest.raises(ModelError, match="differ by"):
        check_architecture(tiny_config("gemma3"))


def test_a_bidirectional_model_does_not_conform():
    config = tiny_config("gemma3")
    config.use_bidirectional_attention = True
    with pytest.raises(ModelError, match="differ by"):
        check_architecture(config)


def test_conformance_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    check_architecture(LlamaConfig(**COMMON))
    assert torch.equal(torch.rand(1), want)


def test_a_failed_load_leaves_no_name_behind(directory):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = set(ALL_ATTENTION_FUNCTIONS.keys())
    edit_weights(directory, lambda w: w.pop("model.norm.weight"))
    refused(directory, "lacks")
    assert set(ALL_ATTENTION_FUNCTIONS.keys()) == before


def test_eos_ids_come_from_the_generation_config_first(directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 9]}))
    assert load(directory).eos_token_ids == {4, 9}
    (directory / "generation_config.json").unlink()
    assert load(directory).eos_token_ids == {2}


def test_a_sharded_checkpoint_loads(tmp_path):
    import torch as t
    from transformers import AutoModelForCausalLM

    t.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load(tmp_path).vocabulary_size == COMMON["vocab_size"]
    next(tmp_path.glob("*-00002-*.safetensors")).unlink()
    refused(tmp_path, "model")


class Projections(torch.nn.Module):
    """Siblings of one input, and one that reads another."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(576, 576, bias=bias)
        self.k_proj = torch.nn.Linear(576, 192, bias=bias)
        self.v_proj = torch.nn.Linear(576, 192, bias=bias)
        self.o_proj = torch.nn.Linear(1536, 576, bias=bias)

    def forward(self, x, y):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(y)


def assert_as_good(got, want, exact):
    """`got` is as near to the exact product as torch's own linear is."""
    error = (got.double() - exact).abs().max()
    assert error <= 2 * (want.double() - exact).abs().max()


@pytest.mark.parametrize("bias", [False, True])
def test_packed_linears_are_as_exact_as_torchs_own(bias):
    if not can_pack(CPU, torch.bfloat16):
        pytest.skip("this CPU has no bfloat16 support in oneDNN")
    torch.manual_seed(0)
    plain = Projections(bias).bfloat16().eval()
    exact = copy.deepcopy(plain).double()
    packed = copy.deepcopy(plain)
    assert pack_linears(packed, torch.bfloat16) == 4
    assert isinstance(packed.q_proj, PackedLinear)
    for rows in (1, 2, 3, 15, 16, 17, 32, 33, 100, 257):
        x, y = torch.randn(1, rows, 576).bfloat16(), torch.randn(1, rows, 1536).bfloat16()
        with torch.inference_mode():
            first = packed(x, y)
            for got, again, want, true in zip(
                first, packed(x, y), plain(x, y), exact(x.double(), y.double()), strict=True
            ):
                assert torch.equal(got, again)  # the second pass finds nothing of the first
                assert_as_good(got, want, true)


def test_a_sibling_called_alone_or_again_computes_its_own_input():
    if not can_pack(CPU, torch.bfloat16):
        pytest.skip("this CPU has no bfloat16 support in oneDNN")
    torch.manual_seed(0)
    plain = Projections(False).bfloat16().eval()
    exact = copy.deepcopy(plain).double()
    packed = copy.deepcopy(plain)
    pack_linears(packed, torch.bfloat16)
    a, b = torch.randn(4, 576).bfloat16(), torch.randn(4, 576).bfloat16()
    with torch.inference_mode():
        for name, x in [("k_proj", a), ("k_proj", a), ("q_proj", b), ("v_proj", a), ("k_proj", b)]:
            assert_as_good(
                getattr(packed, name)(x), getattr(plain, name)(x), getattr(exact, name)(x.double())
            )


def test_packed_linears_are_part_of_one_graph():
    if not can_pack(CPU, torch.bfloat16):
        pytest.skip("this CPU has no bfloat16 support in oneDNN")
    torch.manual_seed(0)
    packed = Projections(True).bfloat16().eval()
    assert pack_linears(packed, torch.bfloat16, merge=False) == 4
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(packed, backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for rows in (2, 7, 32):
            x, y = torch.randn(1, rows, 576).bfloat16(), torch.randn(1, rows, 1536).bfloat16()
            for got, want in zip(compiled(x, y), packed(x, y), strict=True):
                assert torch.equal(got, want)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.bfloat16, {"compiled": True}),
        (torch.bfloat16, {"fused": True}),
        (torch.bfloat16, {}),
        (torch.float32, {"fused": True}),
    ],
)
def test_a_cpu_packs_compiled_and_fused_layers_too(checkpoint, dtype, changes):
    if not can_pack(CPU, dtype, own_rounding=True):
        pytest.skip("oneDNN here has no products of this dtype")
    loaded = load(checkpoint(), dtype, **changes)
    assert loaded.linear == "onednn-packed"
    left = [name for name, module in loaded.model.named_modules()
            if isinstance(module, torch.nn.Linear)]  # fmt: skip
    assert left == []


def test_a_bfloat16_model_on_a_cpu_is_packed_and_a_float32_one_is_not(checkpoint):
    half = load(checkpoint(), torch.bfloat16)
    assert half.linear == ("onednn-packed" if can_pack(CPU, torch.bfloat16) else "torch")
    assert load(checkpoint()).linear == "torch"


def test_tiny_checkpoints_are_seeded(tmp_path):
    a = load_file(save_tiny(tmp_path / "a", "qwen3") / "model.safetensors")
    b = load_file(save_tiny(tmp_path / "b", "qwen3") / "model.safetensors")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_file_whose_weights_lie_elsewhere_computes_the_same(checkpoint, tmp_path):
    """The header's length decides where weights lie in the file, and MKL looks at addresses."""
    moved = Path(shutil.copytree(checkpoint(), tmp_path / "moved"))
    weights = load_file(checkpoint() / "model.safetensors")
    prompt = random_prompts([1])
    outputs = []
    for padding in range(0, 48, 16):
        save_file(weights, moved / "model.safetensors", {"format": "pt", "padding": "x" * padding})
        harness = Harness.make(moved, CPU, max_num_seqs=1)
        assert all(p.data_ptr() % 64 == 0 for p in harness.loaded.model.parameters())
        outputs.append(harness.record(prompt, 4))
    assert all(differing_columns(outputs[0], other) == set() for other in outputs[1:])
