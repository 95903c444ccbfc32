"""Speculative decoding: drafts of any quality change launches, and no token of a replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.speculation import (
    Random,
    Scripted,
    emulated_speculating,
    ngram,
    speculating,
)
from tests.parallel.emulated import emulated
from tests.tiny import Harness, check_supports_agree, differing_columns, random_prompts, save_tiny
from trace_audit.config import SpeculativeConfig
from trace_audit.engine.request import PHASES, RequestOutput
from trace_audit.engine.scheduler import ScheduledRequest
from trace_audit.errors import ConfigError

LENGTHS = [3, 8, 9, 31, 70, 17]
STEPS = 20
TOLERANCE = 1e-4  # nats, of float32 logprobs


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def plain(checkpoint, device, prompts) -> list[RequestOutput]:
    """The greedy run without drafts."""
    return Harness.make(checkpoint(), device).record(prompts, STEPS)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of the same vocabulary that agrees with the target about nothing."""
    return save_tiny(tmp_path_factory.mktemp("other"), seed=7)


def tokens(outputs: list[RequestOutput]) -> dict[str, list[int]]:
    return {o.request_id: o.token_ids.tolist() for o in outputs}


def same_logprobs(
    outputs: list[RequestOutput], plain: list[RequestOutput], *, drawn: bool = False
) -> None:
    """Of the same tokens; supports are equal, but for those that were drawn from these logits."""
    assert tokens(outputs) == tokens(plain)
    for output, want in zip(outputs, plain, strict=True):
        assert output.position.tolist() == want.position.tolist()
        for name in ("logprob", "logsumexp", "entropy", "log_tail_mass"):
            assert np.abs(getattr(output, name) - getattr(want, name)).max() < TOLERANCE, name
        if drawn:
            check_supports_agree(output, want, TOLERANCE)
        else:
            assert output.support_token_ids.tolist() == want.support_token_ids.tolist()


QUALITIES = ["perfect", "wrong-every-3", "always-wrong", "random", "ngram", "itself", "other"]


@pytest.fixture
def drafting(request, checkpoint, plain, other):
    """How an engine comes to drafts of a quality: keyword arguments of `speculating`."""
    right = tokens(plain)
    return {
        "perfect": {"proposer": Scripted(continuations=right)},
        "wrong-every-3": {"proposer": Scripted(continuations=right, wrong=3)},
        "always-wrong": {"proposer": Scripted(continuations=right, wrong=1)},
        "random": {"proposer": Random()},
        "ngram": {"speculative": ngram(num_speculative_tokens=3)},
        "itself": {"draft": checkpoint()},
        "other": {"draft": other},
    }[request.param]


@pytest.mark.parametrize("drafting", QUALITIES, indirect=True)
def test_a_replay_commits_its_trace_whatever_the_drafts(
    checkpoint, device, prompts, plain, drafting
):
    harness = speculating(checkpoint(), device, **drafting)
    same_logprobs(harness.replay(prompts, plain), plain)
    assert harness.built.engine.counters.drafts > 0


@pytest.mark.parametrize("drafting", QUALITIES, indirect=True)
@pytest.mark.parametrize("rejection", ["greedy", "probabilistic"])
def test_greedy_requests_get_the_tokens_they_get_without_drafts(
    checkpoint, device, prompts, plain, drafting, rejection
):
    base = drafting.pop("speculative", SpeculativeConfig())
    speculative = base.model_copy(update={"rejection": rejection})
    harness = speculating(checkpoint(), device, speculative, **drafting)
    same_logprobs(harness.record(prompts, STEPS), plain, drawn=True)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_a_replay_of_what_no_model_would_say(checkpoint, device, wrong):
    """Not one token of the trace is the argmax: what the sampler accepted must not matter."""
    prompts = random_prompts([5, 9])
    traces = {f"r{i}": [300 + i, 2, 7, 2, 511, 0, 2, 5, 5, 5, 5, 9] for i in range(2)}

    def run(harness: Harness) -> list[RequestOutput]:
        return harness.run(
            [
                harness.request(i, p, trace_decode_token_ids=traces[f"r{i}"])
                for i, p in enumerate(prompts)
            ]
        )

    plain = run(Harness.make(checkpoint(), device))
    script = Scripted(continuations=traces, wrong=wrong)
    harness = speculating(checkpoint(), device, proposer=script)
    outputs = run(harness)
    assert tokens(outputs) == traces
    same_logprobs(outputs, plain)
    by_model = speculating(checkpoint(), device, draft=checkpoint())
    same_logprobs(run(by_model), plain)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
def test_every_backend_and_sliding_windows(checkpoint, device, backend, family):
    prompts = random_prompts([9, 30])
    plain = Harness.make(checkpoint(family), device, attention_backend=backend).record(prompts, 8)
    script = Scripted(continuations=tokens(plain), wrong=3)
    for how in ({"proposer": script}, {"draft": checkpoint(family)}):
        harness = speculating(checkpoint(family), device, attention_backend=backend, **how)
        same_logprobs(harness.replay(prompts, plain), plain)
        assert harness.built.engine.counters.accepted_draft_tokens > 0


def test_bfloat16_keeps_the_tokens_of_a_replay(checkpoint, device, prompts, plain):
    for how in (
        {"proposer": Scripted(continuations=tokens(plain), wrong=4)},
        {"draft": checkpoint()},
    ):
        harness = speculating(checkpoint(), device, dtype=torch.bfloat16, **how)
        outputs = harness.replay(prompts, plain)
        assert tokens(outputs) == tokens(plain)
        assert (
            max(np.abs(o.logprob - p.logprob).max() for o, p in zip(outputs, plain, strict=True))
            < 0.5
        )


def test_the_same_configuration_twice_gives_the_same_bytes(checkpoint, device, prompts, plain):
    for how in ({"speculative": ngram()}, {"draft": checkpoint()}):
        runs = [speculating(checkpoint(), device, **how) for _ in range(2)]
        first, second = (run.replay(prompts, plain) for run in runs)
        assert differing_columns(first, second) == set()
        assert runs[0].launches == runs[1].launches


def test_a_replay_has_the_launches_of_the_run_it_replays(checkpoint, device, prompts):
    for how in ({"speculative": ngram()}, {"draft": checkpoint()}):
        record, replay = (speculating(checkpoint(), device, **how) for _ in range(2))
        recorded = record.record(prompts, STEPS)
        assert differing_columns(recorded, replay.replay(prompts, recorded)) == set()
        assert record.launches == replay.launches


def test_draft_rows_are_never_stored_as_rows_of_the_target(checkpoint, device, prompts, plain):
    """A launch's rows are as many as its drafts and one; of rejected ones nothing may be seen."""
    for wrong in (0, 1, 3):
        script = Scripted(continuations=tokens(plain), wrong=wrong)
        harness = speculating(checkpoint(), device, proposer=script)
        committed = []
        outputs = harness.built.engine.run(
            [
                harness.request(i, p, o.support_token_ids, trace_decode_token_ids=o.token_ids)
                for i, (p, o) in enumerate(zip(prompts, plain, strict=True))
            ],
            committed.append,
        )
        assert [len(o.token_ids) for o in outputs] == [STEPS] * len(prompts)
        assert sum(committed) == STEPS * len(prompts)
        counters = harness.built.engine.counters
        assert (counters.draft_tokens > counters.accepted_draft_tokens) == (wrong > 0)
        # Every stored row is of the token that the trace has there, by its own statistics.
        for output, want in zip(outputs, plain, strict=True):
            assert output.rank.tolist() == want.rank.tolist()
            assert output.position.tolist() == want.position.tolist()
            assert (output.token_ids >= 0).all()


def test_phases_and_launches_say_how_each_token_was_computed(checkpoint, device):
    prompt = random_prompts([5])[0]
    trace = list(range(20, 30))
    harness = speculating(
        checkpoint(), device, proposer=Scripted(continuations={"r0": trace}, wrong=3)
    )
    output = harness.run([harness.request(0, prompt, trace_decode_token_ids=trace)])[0]
    # Prefill commits place 0; places 3, 6, 9 are where drafts are wrong.
    assert harness.launches == [(5,), (5,), (5,), (3,)]
    assert [PHASES[i] for i in output.phase] == ["prefill"] + ["verify"] * 9
    assert output.chunk_start.tolist() == [0, 5, 5, 5, 8, 8, 8, 11, 11, 11]
    assert output.launch_tokens.tolist() == [5] * 7 + [3] * 3
    counters = harness.built.engine.counters.as_counts()
    assert (counters["drafts"], counters["draft_tokens"]) == (3, 10)
    assert counters["accepted_draft_tokens"] == 6
    assert [counters[f"accepted_at_{i}"] for i in (1, 2, 3, 4)] == [3, 3, 0, 0]


def test_without_a_match_there_is_no_draft_and_no_row_is_verified(checkpoint, device):
    harness = speculating(checkpoint(), device, ngram())
    trace = list(range(100, 112))
    output = harness.run([harness.request(0, [5, 6, 7], trace_decode_token_ids=trace)])[0]
    assert [PHASES[i] for i in output.phase] == ["prefill"] + ["decode"] * 11
    assert harness.built.engine.counters.drafts == 0
    assert output.token_ids.tolist() == trace


def test_a_repeating_trace_is_drafted_by_ngram(checkpoint, device):
    harness = speculating(checkpoint(), device, ngram())
    trace = [30, 31, 32, 33] * 6
    output = harness.run([harness.request(0, [5, 6, 7], trace_decode_token_ids=trace)])[0]
    assert output.token_ids.tolist() == trace
    counters = harness.built.engine.counters
    assert counters.accepted_draft_tokens == counters.draft_tokens >= 12
    assert counters.steps < 16


def test_mixed_batches_leave_free_requests_as_they_are(checkpoint, device, prompts, plain):
    traces = {1: [5, 6] * 10, 3: list(range(20))}
    right = tokens(plain) | {f"r{i}": trace for i, trace in traces.items()}
    for how in (
        {"proposer": Scripted(continuations=right, wrong=4)},
        {"speculative": ngram()},
        {"draft": checkpoint()},
    ):
        harness = speculating(checkpoint(), device, **how)
        outputs = harness.run(
            [
                harness.request(i, p, trace_decode_token_ids=traces[i])
                if i in traces
                else harness.request(i, p, max_tokens=STEPS, ignore_eos=True)
                for i, p in enumerate(prompts)
            ]
        )
        assert tokens(outputs) == right
        free = [i for i in range(len(prompts)) if i not in traces]
        assert all(np.abs(outputs[i].logprob - plain[i].logprob).max() < TOLERANCE for i in free)


def test_more_requests_than_slots_and_a_free_one_in_a_reused_slot(checkpoint, device):
    prompts = random_prompts([5, 6, 7, 8, 9, 10, 11])
    traces = {f"r{i}": [100 + i] * (i + 2) for i in range(6)}
    alone = Harness.make(checkpoint(), device, max_num_seqs=2).record(prompts[-1:], 6)[0]
    for how in ({"speculative": ngram()}, {"draft": checkpoint()}):
        harness = speculating(checkpoint(), device, max_num_seqs=2, **how)
        requests = [
            harness.request(i, p, trace_decode_token_ids=traces[f"r{i}"])
            for i, p in enumerate(prompts[:-1])
        ]
        requests.append(harness.request(6, prompts[-1], max_tokens=6, ignore_eos=True))
        outputs = harness.run(requests)
        assert tokens(outputs) == traces | {"r6": alone.token_ids.tolist()}


def test_chunked_prefill_and_a_small_token_budget(checkpoint, device, plain, prompts):
    """Drafts give way: every request keeps a token of each launch, and prompts go on."""
    for how in (
        {"proposer": Scripted(continuations=tokens(plain), wrong=5)},
        {"draft": checkpoint()},
    ):
        harness = speculating(checkpoint(), device, max_num_batched_tokens=8, **how)
        same_logprobs(harness.replay(prompts, plain), plain)
        assert max(sum(launch) for launch in harness.launches) == 8
        assert harness.built.engine.counters.draft_tokens > 0


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("drafting", ["wrong-every-3", "ngram", "itself"], indirect=True)
def test_preemption_commits_the_same_tokens(checkpoint, device, preemption, drafting):
    prompts = random_prompts([20, 30, 25, 18])
    ample = Harness.make(checkpoint(), device).record(prompts, 40)
    if "proposer" in drafting:
        drafting["proposer"] = Scripted(continuations=tokens(ample), wrong=3)
    # 4 sequences of up to 70 tokens need 33 blocks of 8.
    tight = speculating(checkpoint(), device, num_kv_blocks=20, preemption=preemption, **drafting)
    same_logprobs(tight.replay(prompts, ample), ample)
    counters = tight.built.engine.counters
    assert counters.preemptions > 0
    assert counters.drafts > 0
    assert (counters.swapped_blocks > 0) == (preemption == "swap")


def test_a_draft_models_cache_survives_preemption_too(checkpoint, device):
    """The model drafts for itself: any draft that is rejected comes from a wrong cache."""
    prompts = random_prompts([20, 30, 25, 18])
    ample = Harness.make(checkpoint(), device).record(prompts, 40)
    for preemption in ("swap", "recompute"):
        tight = speculating(
            checkpoint(), device, num_kv_blocks=20, preemption=preemption, draft=checkpoint()
        )
        tight.replay(prompts, ample)
        counters = tight.built.engine.counters
        assert counters.preemptions > 0
        assert counters.accepted_draft_tokens == counters.draft_tokens > 0


def test_a_draft_models_cache_is_right_after_a_rejection(checkpoint, device):
    """Two tokens are forced: the drafts after them are the target's own only if both were seen."""
    prompt = random_prompts([12])[0]
    forced = [7, 300]
    continuation = Harness.make(checkpoint(), device).record([prompt + forced], 10)[0]
    trace = forced + continuation.token_ids.tolist()
    harness = speculating(checkpoint(), device, draft=checkpoint())
    output = harness.run([harness.request(0, prompt, trace_decode_token_ids=trace)])[0]
    assert output.token_ids.tolist() == trace
    # Both forced tokens come as a correction (the first one from prefill); then all drafts stay.
    counters = harness.built.engine.counters.as_counts()
    assert counters["draft_tokens"] - counters["accepted_draft_tokens"] == 4
    assert counters["accepted_draft_tokens"] >= 7


def test_what_was_computed_from_a_rejected_draft_is_never_read(checkpoint, device, prompts, plain):
    """Poison behind the committed tokens, in both caches, changes no bit."""
    clean = speculating(checkpoint(), device, draft=checkpoint()).replay(prompts, plain)
    harness = speculating(checkpoint(), device, draft=checkpoint())
    engine, runner = harness.built.engine, harness.built.engine._runner
    step = engine.step

    def poisoned():
        count = step()
        for request in engine._scheduler.running:
            for place, block in enumerate(request.block_ids):
                first = max(0, request.num_computed_tokens - place * runner.block_size)
                for cache in runner._caches:
                    for side in (*cache.keys, *cache.values):
                        side.data[block, first:] = 1e4
        return count

    engine.step = poisoned
    assert differing_columns(harness.replay(prompts, plain), clean) == set()


def test_a_rejected_draft_leaves_no_block_behind(checkpoint, device):
    prompt = random_prompts([7])[0]
    harness = speculating(
        checkpoint(), device, proposer=Scripted(continuations={"r0": [9] * 30}, wrong=1)
    )
    engine = harness.built.engine
    request = harness.request(0, prompt, trace_decode_token_ids=[9] * 30)
    engine._scheduler.add(request)
    with torch.inference_mode():
        while engine._scheduler.has_work:
            engine.step()
            needed = 0 if request.finish_reason else -(-request.num_computed_tokens // 8)
            assert len(request.block_ids) == needed
            assert engine._scheduler.pool.num_free == 64 - needed
    assert engine.counters.drafts == 28  # none with the last token, that nothing follows


def test_the_trace_behind_the_committed_tokens_is_neither_read_nor_written(checkpoint, device):
    """Inputs are the committed tokens and the drafts, half of which are not the trace's."""
    prompt = random_prompts([9])[0]
    trace = list(range(40, 60))
    script = Scripted(continuations={"r0": trace}, wrong=2)
    harness = speculating(checkpoint(), device, proposer=script)
    runner = harness.built.engine._runner
    forward, seen = runner._loaded.forward, []
    gather = runner.request_state.gather_input_ids

    def gathered(slots, columns):
        assert (columns < runner.request_state.total_len.gpu[slots, 0]).all()
        return gather(slots, columns)

    runner.request_state.gather_input_ids = gathered

    def spy(input_ids, positions, rows):
        state = runner.request_state
        total = int(state.total_len.gpu[0, 0])
        ids = state.all_token_ids.gpu[0]
        assert ids[total : len(prompt) + len(trace)].tolist() == trace[total - len(prompt) :]
        seen.append((positions.tolist(), input_ids.tolist()))
        return forward(input_ids, positions, rows)

    object.__setattr__(runner._loaded, "forward", spy)
    harness.run([harness.request(0, prompt, trace_decode_token_ids=trace)])
    whole = prompt + trace
    for positions, ids in seen[1:]:
        assert ids[0] == whole[positions[0]]
        for position, token in zip(positions[1:], ids[1:], strict=True):
            place = position - len(prompt)
            assert token == trace[place] + (place % 2 == 0)


@pytest.mark.parametrize("stop_at", [3, 4, 5, 6, 7])
def test_a_free_request_that_stops_inside_its_drafts_commits_nothing_past_the_stop(
    checkpoint, device, prompts, plain, stop_at
):
    """Place 3 to 7: before, in and behind the first verified window and at its end."""
    eos = int(plain[3].token_ids[stop_at])
    end = plain[3].token_ids.tolist().index(eos) + 1
    script = Scripted(continuations=tokens(plain))
    for how in ({"proposer": script}, {"draft": checkpoint()}):
        harness = speculating(checkpoint(), device, **how)
        outputs = harness.run(
            [
                harness.request(
                    i, prompts[i], max_tokens=STEPS, ignore_eos=True, stop_token_ids=stop
                )
                for i, stop in ((2, ()), (3, (eos,)), (4, ()))
            ]
        )
        assert outputs[1].finish_reason == "stop"
        assert outputs[1].token_ids.tolist() == plain[3].token_ids.tolist()[:end]
        for output, want in ((outputs[0], plain[2]), (outputs[2], plain[4])):
            assert output.token_ids.tolist() == want.token_ids.tolist()
        again = harness.replay([prompts[5]], [plain[5]])  # in the slot that it left
        assert again[0].token_ids.tolist() == plain[5].token_ids.tolist()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_no_draft_passes_max_tokens_or_the_model_length(checkpoint, device, max_tokens):
    prompt = random_prompts([26])[0]
    harness = speculating(
        checkpoint(), device, draft=checkpoint(), max_model_len=26 + max_tokens, block_size=4
    )
    output = harness.record([prompt], max_tokens)[0]
    plain = Harness.make(checkpoint(), device).record([prompt], max_tokens)[0]
    assert output.token_ids.tolist() == plain.token_ids.tolist()
    counters = harness.built.engine.counters
    assert counters.accepted_draft_tokens == counters.draft_tokens == max(0, max_tokens - 2)


def test_drafts_are_for_decode_rows_only(checkpoint, device, prompts, plain):
    harness = speculating(
        checkpoint(), device, proposer=Scripted(continuations=tokens(plain)),
        max_num_batched_tokens=16,
    )  # fmt: skip
    scheduler = harness.built.engine._scheduler
    schedule, seen = scheduler.schedule, []

    def spy() -> list[ScheduledRequest]:
        scheduled = schedule()
        seen.extend((s, s.request.total_len) for s in scheduled)
        return scheduled

    scheduler.schedule = spy
    harness.replay(prompts, plain)
    drafted = [(s, total) for s, total in seen if s.draft_token_ids]
    assert drafted
    assert all(s.chunk_start == total - 1 >= s.request.prompt_len for s, total in drafted)
    assert {s.phase for s, _ in drafted} == {"verify"}
    assert {s.phase for s, _ in seen if not s.draft_token_ids} >= {"prefill"}


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("drafting", ["wrong-every-3", "ngram", "itself"], indirect=True)
def test_ranks_agree_on_drafts(checkpoint, device, prompts, plain, sizes, drafting):
    with emulated_speculating(checkpoint(), device, emulated(*sizes), **drafting) as harness:
        same_logprobs(harness.replay(prompts, plain), plain)
        launches = list(harness.launches)
        mixed = [
            harness.request(0, prompts[0], trace_decode_token_ids=[5, 6] * 10),
            harness.request(1, prompts[1], max_tokens=STEPS, ignore_eos=True),
        ]
        outputs = harness.run(mixed)
        assert outputs[0].token_ids.tolist() == [5, 6] * 10
        assert outputs[1].token_ids.tolist() == plain[1].token_ids.tolist()
    alone = speculating(checkpoint(), device, **drafting)
    alone.replay(prompts, plain)
    assert alone.launches == launches


def test_a_draft_model_of_another_vocabulary_is_refused(checkpoint, device, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.tiny import COMMON

    config = LlamaConfig(**(COMMON | {"vocab_size": 256}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a vocabulary of 256 ids and the model one of 512"):
        speculating(checkpoint(), device, draft=tmp_path)


def test_without_replay_state_free_requests_still_speculate(checkpoint, device, prompts, plain):
    harness = speculating(
        checkpoint(), device, proposer=Scripted(continuations=tokens(plain), wrong=3),
        enable_trace_replay=False,
    )  # fmt: skip
    same_logprobs(harness.record(prompts, STEPS), plain, drawn=True)
    assert harness.built.engine._runner.trace_replay is None
