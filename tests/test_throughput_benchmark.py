"""`benchmarks/throughput.py` and `benchmarks/scaling.py` on a tiny shape, and their arithmetic."""

from __future__ import annotations

import json
import statistics
import sys

import pytest
import torch

from benchmarks import rounds, scaling, scaling_points, throughput, transformers_side
from benchmarks.engine_side import EngineSide, engine_config, load_engine_model
from benchmarks.fit import fitted
from benchmarks.floor import kv_bytes, linear_seconds, weight_bytes
from benchmarks.measure import Timing, step_seconds
from benchmarks.peer_process import PeerSide
from benchmarks.rounds import Entry
from benchmarks.shapes import random_model
from benchmarks.transformers_side import NotRun, without_defaults
from benchmarks.workload import Workload
from trace_audit.attention.base import LayerSpec
from trace_audit.errors import ConfigError
from trace_audit.models.packed_linear import PackedLinear

ARGUMENTS = ["--model", "tiny", "--rows", "3", "--context", "12", "--tokens", "5", "--rounds", "2",
             "--dtype", "float32", "--device", "cpu", "--set", "num_threads=1"]  # fmt: skip
FAKE_VLLM = """
import time
from types import SimpleNamespace as N
__version__ = "9.9"
now = [0.0]
time.perf_counter = lambda: now[0]
class SamplingParams(N): pass
class LLM:
    def __init__(self, **options):
        assert options["enable_prefix_caching"] is False
        assert options["load_format"] == "dummy"
        print("words that are no answer")
    def generate(self, prompts, params, use_tqdm):
        assert params.logprobs == 3
        now[0] += 1 + 0.25 * params.max_tokens
        ids = [0] * (params.max_tokens - SHORT)
        return [N(outputs=[N(token_ids=ids)]) for _ in prompts]
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The document and the printed table of one run with every side."""
    path = tmp_path_factory.mktemp("throughput") / "all.json"
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "print", printed.append, raising=False)
        assert throughput.main([*ARGUMENTS, "--peer", "vllm", "--json", str(path)]) == 0
    return json.loads(path.read_text()), printed[0].splitlines()


def side(document, name):
    (found,) = (entry for entry in document["sides"] if entry["name"] == name)
    return found


def test_every_ratio_is_of_one_round_of_this_run(measured):
    document, _ = measured
    replay = side(document, "replay")["seconds"]
    for name in ("replay", "free", "plain", "generate", "generate-batch"):
        own = side(document, name)
        assert own["not_run"] is None
        assert sorted(own["seconds"]) == ["0", "1"]
        expected = [own["seconds"][number] / replay[number] for number in ("0", "1")]
        assert own["replay_speedup"]["by_round"] == pytest.approx(expected)
        assert own["replay_speedup"]["median"] == pytest.approx(statistics.median(expected))
        speeds = [15 / own["seconds"][number] for number in ("0", "1")]
        assert own["tokens_per_second"]["by_round"] == pytest.approx(speeds)
        floor = document["beside"]["floor_ms"]["by_round"]
        steps = own["step_ms"]["by_round"]
        over = [step / least for step, least in zip(steps, floor, strict=True)]
        assert own["step_over_floor"]["by_round"] == pytest.approx(over)


def test_what_does_not_run_here_is_a_row_that_says_why(measured):
    document, table = measured
    for name, reason in (
        ("vllm", "vllm is not installed"),
        ("generate-static", "transformers compiles the forward of a static cache on CUDA alone"),
    ):
        own = side(document, name)
        assert own["not_run"].startswith(reason)
        assert own["tokens_per_second"] is None
        assert any(f"not run: {reason}" in line for line in table)
    rows = [line for line in table if line.startswith("| ")]
    assert [line.count("|") for line in rows[1:8]] == [6] * 7


def test_the_document_has_environment_and_command(measured):
    document, _ = measured
    environment = document["environment"]
    assert environment["versions"]["torch"] == torch.__version__
    assert {"triton", "transformers"} <= set(environment["versions"])
    assert environment["device"] == "cpu"
    assert environment["torch_threads"] == 1
    assert environment["cpu_count"] > 0
    assert document["command"].startswith("python -m benchmarks.throughput --model tiny --rows 3")
    assert document["engine"]["config"]["engine.num_threads"] == 1
    assert document["workload"] == {"rows": 3, "tokens": 5, "prompt_tokens": [12] * 3}


def test_the_replay_s_overhead_is_its_step_beside_a_plain_one(measured):
    document, _ = measured
    replay, plain = (side(document, name)["step_ms"]["by_round"] for name in ("replay", "plain"))
    differences = [a - b for a, b in zip(replay, plain, strict=True)]
    assert document["beside"]["overhead_ms"]["by_round"] == pytest.approx(differences)


def test_generate_can_take_the_logprob_and_the_rank_of_every_token():
    model = without_defaults(random_model("tiny", dtype=torch.float32, device=torch.device("cpu")))
    workload = Workload(prompts=((5, 6, 7), (8, 9, 3)), num_tokens=4)
    criteria: list[transformers_side._StampCriteria] = []

    def keep(*arguments, **named):
        criteria.append(_StampCriteria(*arguments, **named))
        return criteria[-1]

    _StampCriteria = transformers_side._StampCriteria
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_side, "_StampCriteria", keep)
        transformers_side.Generate("generate", model, workload, "dynamic", logprobs=True).run()
    (one,) = criteria
    assert len(one.rows) == 4
    with torch.inference_mode():
        first = model(torch.tensor(workload.prompts)).logits[:, -1].log_softmax(-1).amax(-1)
    # Greedy: the token is the likeliest, and first in rank.
    torch.testing.assert_close(one.rows[0][:, 0], first, rtol=0, atol=1e-5)
    assert all(rows[:, 1].tolist() == [1.0, 1.0] for rows in one.rows)


def test_an_error_of_another_s_code_is_a_row_and_one_of_ours_is_not_caught():
    def broken():
        raise ValueError("no such\nthing")

    other = Entry(name="generate", make=broken, is_own=False)
    other.start()
    assert other.not_run == "ValueError: no such"
    assert "broken" in (other.error or "")
    other.run(0)
    assert other.timings == {}
    with pytest.raises(ValueError, match="no such"):
        Entry(name="replay", make=broken, is_own=True).start()


def test_rounds_alternate_and_miss_no_side():
    order: list[str] = []

    class Side:
        def __init__(self, name):
            self.name = name

        def run(self):
            order.append(self.name)
            return Timing(seconds=1.0, step_seconds=None)

    entries = [Entry(name=n, make=lambda n=n: Side(n), is_own=True) for n in "abc"]
    for entry in entries:
        entry.start()
    done = rounds.run_rounds(entries, {"beside": lambda: 2.0}, 3)
    assert "".join(order) == "abccbaabc"
    assert done.beside == {"beside": [2.0] * 3}
    assert done.over(lambda r: done.step("a", r)) is None


@pytest.mark.parametrize("short", [0, 1])
def test_a_peer_in_its_own_process_answers_round_by_round(tmp_path, monkeypatch, short):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("SHORT", str(short)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = {"model": "m", "dtype": "float32", "load_format": "dummy", "logprobs": 3,
           "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.5}  # fmt: skip
    peer = PeerSide("vllm", job, Workload(prompts=((1, 2), (3,)), num_tokens=6), sys.executable)
    try:
        if short:
            with pytest.raises(NotRun, match=r"vLLM 9\.9: RuntimeError: vLLM gave \[5\] tokens"):
                peer.start()
            return
        peer.start()
        assert peer.version == "9.9"
        for _ in range(2):
            timing = peer.run()
            assert timing == Timing(seconds=2.5, step_seconds=0.25)
    finally:
        peer.close()


def test_a_step_is_taken_between_full_launches_alone():
    # Two launches prefill, the second of which fills the batch; one row ends before the others.
    marks, committed = [0.0, 1.0, 1.5, 2.0, 2.1], [1, 3, 3, 3, 2]
    assert step_seconds(marks, committed, 3) == 0.5
    assert step_seconds(marks, committed, 2) is None


def test_bytes_of_a_step():
    tied = random_model("tiny", dtype=torch.float32, device="cpu")
    untied = random_model("tiny", dtype=torch.float32, device="cpu", tied=False)
    assert weight_bytes(tied) == weight_bytes(untied)
    assert weight_bytes(tied) == sum(4 * p.numel() for p in tied.parameters())
    layer = {"num_heads": 4, "num_kv_heads": 2, "key_dim": 8, "value_dim": 16, "scale": 1.0,
             "softcap": None}  # fmt: skip
    layers = [LayerSpec(window=None, **layer), LayerSpec(window=4, **layer)]
    # Two heads of 24 numbers of two bytes: 96 a token, all 13 of them and 4 + 3 in the window.
    assert kv_bytes(layers, [10.0, 3.0], "bfloat16") == 96 * 13 + 96 * 7


def test_a_model_in_memory_lends_its_weights_to_the_engine_and_stays_as_it_is():
    model = random_model("tiny", dtype=torch.float32, device="cpu")
    workload = Workload(prompts=((5, 6, 7),), num_tokens=4)
    config = engine_config(workload, device="cpu", dtype="float32", attention_backend="eager",
                           sets=["num_threads=1"])  # fmt: skip
    loaded, _ = load_engine_model(model, config.engine)
    own = dict(model.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert parameter.data_ptr() == own[name].data_ptr()
    side = EngineSide("free", loaded, config, workload, None)
    recording = side.record()
    assert model.config._attn_implementation == "sdpa"
    # The engine's tokens are those of the model it was lent.
    ids = torch.tensor([[*workload.prompts[0], *recording.traces[0]]])
    with torch.inference_mode():
        best = model(ids).logits[0].argmax(-1)
    assert recording.traces[0] == best[2:6].tolist()


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["path=prefill"], "no decode steps"),
        (["scoring.mode=processed"], "scoring.mode cannot be set here"),
        (["dtype=bfloat16"], "engine.dtype cannot be set here"),
        (["block_size=16,32"], "one value a key"),
    ],
)
def test_what_has_no_step_to_compare_is_refused(sets, said):
    workload = Workload(prompts=((5, 6),), num_tokens=2)
    with pytest.raises(ConfigError, match=said):
        engine_config(workload, device="cpu", dtype="float32", attention_backend="eager", sets=sets)


def test_every_linear_layer_is_computed_once_a_step(monkeypatch):
    model = random_model("tiny", dtype=torch.float32, device="cpu")
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear | PackedLinear)]
    calls: list[torch.Size] = []
    forward = torch.nn.Linear.forward

    def counted(layer, x):
        calls.append(x.shape)
        return forward(layer, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    assert linear_seconds(model, 3, repeats=2) > 0
    # One step to warm up, then two.
    assert len(calls) == 3 * len(linears) == 3 * (2 * 7 + 1)
    assert {shape[1] for shape in calls} == {3}


def test_lines_go_through_their_points():
    line = fitted([1, 2, 4], [5.0, 7.0, 11.0])
    assert line is not None
    assert (line.slope, line.intercept) == pytest.approx((2.0, 3.0))
    assert line.r_squared == pytest.approx(1.0)
    assert fitted([2, 2], [1.0, 3.0]) is None


def test_scaling_has_a_floor_beside_every_step_and_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scaling_points, "copy_bandwidth", lambda device: 2e9)
    path = tmp_path / "scaling.json"
    arguments = ["--shapes", "tiny", "--rows", "1", "3", "--contexts", "8", "50000",
                 "--base-rows", "2", "--base-context", "8", "--tokens", "4", "--rounds", "1",
                 "--dtype", "float32", "--device", "cpu", "--set", "num_threads=1"]  # fmt: skip
    assert scaling.main([*arguments, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [(p["sweep"], p["rows"], p["context"]) for p in document["points"]] == [
        ("rows", 1, 8), ("rows", 3, 8), ("context", 2, 8), ("context", 2, 50000), ("weights", 2, 8)
    ]  # fmt: skip
    for point in document["points"]:
        assert (point["step_ms"] is None) == (point["context"] == 50000)
        gigabytes = point["weight_gb"] + point["kv_gb"]
        assert point["floor_ms"] == pytest.approx(1000 * gigabytes / 2)
    too_large = document["points"][3]["not_run"]
    assert too_large == "sequences of 50004 tokens exceed the model's context of 40960"
    assert f"not run: {too_large}" in capsys.readouterr().out
    steps = [point["step_ms"]["median"] for point in document["points"][:2]]
    slope = document["lines"]["rows"]["step"]["slope"]
    assert slope == pytest.approx((steps[1] - steps[0]) / 2)
    assert document["lines"]["weights"]["step"] is None
    assert document["environment"]["torch_threads"] == 1
