"""Staged writes, unified-addressing buffers, slots and the trace's place in them."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trace_audit.engine import buffers
from trace_audit.engine.buffers import StagedWriteTensor, UvaBackedTensor
from trace_audit.engine.request import Request
from trace_audit.engine.request_state import RequestState
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.engine.trace_replay import TraceReplayState


def request(prompt: list[int], outputs: list[int] | None = None, trace: list[int] | None = None):
    return Request(
        request_id="r",
        index=0,
        prompt_token_ids=prompt,
        params=SamplingParams(trace_decode_token_ids=trace, max_tokens=8),
        output_token_ids=list(outputs or []),
    )


class Slots:
    """Both states with one lifecycle, as the model runner drives them."""

    def __init__(self, device: torch.device, num: int = 4, width: int = 16) -> None:
        self.state = RequestState(num, width, device)
        self.replay = TraceReplayState(num, device)
        self.device = device

    def admit(self, *requests: Request) -> None:
        for r in requests:
            self.state.add_request(r)
            self.replay.add_request(r)
        self.state.apply_staged_writes()
        self.replay.apply_staged_writes()

    def release(self, r: Request) -> None:
        self.replay.remove_request(r)
        self.state.remove_request(r)

    def apply(self, *requests: Request) -> list[int]:
        sampled = torch.full((len(requests),), -7, dtype=torch.int64, device=self.device)
        mapping = torch.tensor([r.slot for r in requests], dtype=torch.int32, device=self.device)
        self.replay.apply_trace(sampled, mapping, self.state)
        return sampled.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_staged_rows_reach_the_device_in_one_flush(dtype, device):
    tensor = StagedWriteTensor(4, 6, dtype=dtype, device=device)
    tensor.stage_write(2, 1, [5, 6, 7])
    tensor.stage_write(0, 0, [1])
    tensor.stage_write(1, 3, [])
    assert tensor.num_staged == 2
    assert not tensor.gpu.any()
    tensor.apply_writes()
    want = torch.zeros(4, 6, dtype=dtype)
    want[2, 1:4] = torch.tensor([5, 6, 7], dtype=dtype)
    want[0, 0] = 1
    assert torch.equal(tensor.gpu.cpu(), want)
    assert tensor.num_staged == 0


@pytest.mark.parametrize(("row", "start", "count"), [(0, 5, 2), (0, 0, 7), (4, 0, 1), (0, -1, 1)])
def test_a_write_that_leaves_the_row_is_refused_at_staging(row, start, count, device):
    """Case 19: it would spill into the neighbour's tokens."""
    tensor = StagedWriteTensor(4, 6, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="row"):
        tensor.stage_write(row, start, [1] * count)


def test_a_row_takes_one_write_a_flush(device):
    tensor = StagedWriteTensor(4, 6, dtype=torch.int32, device=device)
    tensor.stage_write(1, 0, [1])
    with pytest.raises(ValueError, match="already"):
        tensor.stage_write(1, 3, [2])


def test_unsupported_dtypes_are_refused(device):
    with pytest.raises(ValueError, match="int32"):
        StagedWriteTensor(1, 1, dtype=torch.float16, device=device)


def test_uva_tensor_publishes_the_host_array_on_copy_only(device):
    tensor = UvaBackedTensor(3, dtype=torch.int32, device=device)
    tensor.np[:] = [1, 2, 3]
    assert tensor.gpu.tolist() == [0, 0, 0]
    first = tensor.copy_to_uva()
    assert first.tolist() == [1, 2, 3]
    tensor.np[0] = 9
    assert tensor.gpu.tolist() == [1, 2, 3]
    assert tensor.copy_to_uva().tolist() == [9, 2, 3]


@pytest.mark.gpu
def test_queued_work_keeps_reading_the_buffer_it_was_given(device):
    tensor = UvaBackedTensor(1, dtype=torch.int32, device=device)
    copies = []
    for value in range(8):
        tensor.np[0] = value
        published = tensor.copy_to_uva()
        torch.cuda._sleep(20_000_000)
        copies.append(published.to(device, non_blocking=True))
    assert [int(c) for c in copies] == list(range(8))


def test_add_flush_apply_end_to_end(device):
    slots = Slots(device)
    a, b = request([1, 2], trace=[10, 11]), request([3], trace=[20])
    slots.admit(a, b)
    assert slots.apply(b, a) == [20, 10]


def test_slots_are_handed_out_lowest_first(device):
    slots = Slots(device)
    a, b, c = request([1]), request([2]), request([3])
    slots.admit(a, b, c)
    assert [a.slot, b.slot, c.slot] == [0, 1, 2]
    freed = b.slot
    slots.release(c)
    slots.release(b)
    again = request([4])
    slots.admit(again)
    assert again.slot == freed


def test_a_reused_slot_does_not_replay_its_former_trace(device):
    """Case 20."""
    slots = Slots(device, num=1)
    slots.admit(old := request([1], trace=[10, 11]))
    slots.release(old)
    slots.admit(free := request([1]))
    assert slots.apply(free) == [-7]
    # Another slot's trace must be there for the kernel to run at all.
    slots = Slots(device, num=2)
    slots.admit(old := request([1], trace=[10, 11]))
    slots.release(old)
    slots.admit(free := request([1]), other := request([2], trace=[30]))
    assert slots.apply(free, other) == [-7, 30]


def test_resume_stages_only_the_unconsumed_suffix(device):
    slots = Slots(device)
    r = request([1, 2], outputs=[10, 11], trace=[10, 11, 12, 13])
    slots.admit(r)
    row = slots.state.all_token_ids.gpu[r.slot].tolist()
    assert row[:6] == [1, 2, 10, 11, 12, 13]
    assert int(slots.state.total_len.gpu[r.slot]) == 4
    assert slots.apply(r) == [12]


def test_an_exhausted_trace_adds_no_suffix(device):
    slots = Slots(device)
    r = request([1, 2], outputs=[10], trace=[10])
    slots.admit(r)
    assert slots.state.all_token_ids.gpu[r.slot].tolist()[:4] == [1, 2, 10, 0]
    assert slots.apply(r) == [-7]


def test_partial_prefill_keeps_the_start_of_the_trace(device):
    slots = Slots(device)
    r = request([1, 2, 3], trace=[10, 11])
    slots.admit(r)
    r.num_computed_tokens = 2  # a chunk went through; nothing was committed
    assert slots.apply(r) == [10]
    assert slots.apply(r) == [10]


def test_appending_moves_the_step_on_the_device(device):
    slots = Slots(device)
    r = request([1, 2], trace=[10, 11, 12])
    slots.admit(r)
    for want in (10, 11, 12):
        assert slots.apply(r) == [want]
        slots.state.append_tokens(*torch.tensor([[r.slot], [0], [want]], device=device))
    assert slots.apply(r) == [-7]


def test_several_tokens_of_a_request_are_appended_at_once(device):
    slots = Slots(device)
    first, second = request([1, 2], trace=[10, 11, 12, 13]), request([3])
    slots.admit(first)
    slots.admit(second)
    rows = [first.slot, first.slot, second.slot, first.slot]
    appended = torch.tensor([rows, [0, 1, 0, 2], [10, 11, 7, 12]], device=device)
    slots.state.append_tokens(*appended)
    assert slots.apply(first) == [13]
    assert slots.state.all_token_ids.gpu[first.slot, :6].tolist() == [1, 2, 10, 11, 12, 13]
    assert slots.state.all_token_ids.gpu[second.slot, :2].tolist() == [3, 7]
    assert slots.state.total_len.gpu[:, 0].tolist()[second.slot] == 2


def test_a_full_admission_batch_is_one_write_a_request_and_one_launch(device, monkeypatch):
    launches = []
    scatter = buffers.scatter_values

    def counted(out, destinations, values):
        launches.append(out)
        scatter(out, destinations, values)

    monkeypatch.setattr(buffers, "scatter_values", counted)
    slots = Slots(device, num=8)
    requests = [request([i], trace=[i + 10]) for i in range(8)]
    for r in requests:
        slots.state.add_request(r)
        slots.replay.add_request(r)
    assert slots.state.all_token_ids.num_staged == 8
    slots.state.apply_staged_writes()
    slots.replay.apply_staged_writes()
    rows = slots.state.all_token_ids.gpu
    assert sum(out.data_ptr() == rows.data_ptr() for out in launches) == 1
    assert slots.apply(*requests) == [i + 10 for i in range(8)]


def test_no_trace_anywhere_is_no_launch(device):
    def no_launch(*args: object) -> None:
        raise AssertionError("launched")

    slots = Slots(device)
    slots.replay = TraceReplayState(4, device, SimpleNamespace(apply_trace_tokens=no_launch))
    r = request([1])
    slots.admit(r)
    assert slots.apply(r) == [-7]


def tensor_bytes() -> int:
    """Bytes of every live torch storage, wherever it is."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # By type: isinstance would ask lazy modules for their class. Weights that oneDNN laid out
        # for an earlier model have no storage that can be asked for.
        if issubclass(type(thing), torch.Tensor) and not thing.is_mkldnn:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measured(make) -> tuple[int, object]:
    before = tensor_bytes()
    kept = make()
    return tensor_bytes() - before, kept


def test_the_trace_costs_its_lengths_and_no_second_matrix(device):
    num_reqs, width = 256, 40960
    rows, _state = measured(lambda: RequestState(num_reqs, width, device))
    replay, kept = measured(lambda: TraceReplayState(num_reqs, device))
    matrix, _matrix = measured(
        lambda: torch.zeros(num_reqs, width, dtype=torch.int32, device=device)
    )
    assert matrix == 41_943_040
    assert replay == kept.trace_len.nbytes
    # One buffer of int32 lengths on a CPU, two pinned ones where the device reads them.
    assert replay == num_reqs * 4 * (2 if device.type == "cuda" else 1)
    assert rows >= matrix


def test_an_engine_with_the_switch_on_allocates_the_lengths_more(checkpoint, device):
    from tests.tiny import Harness

    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 512, "num_kv_blocks": 64}

    def engine(enabled: bool) -> int:
        make = lambda: Harness.make(checkpoint(), device, enable_trace_replay=enabled, **sizes)  # noqa: E731
        used, _harness = measured(make)
        return used

    engine(True)  # what the first of all allocates once
    lengths = 256 * 4 * (2 if device.type == "cuda" else 1)
    assert engine(True) - engine(False) == lengths


@pytest.mark.gpu
def test_the_trace_costs_no_device_memory_at_all(device):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    replay = TraceReplayState(256, device)
    assert torch.cuda.memory_allocated() - before == 0
    matrix = torch.zeros(256, 40960, dtype=torch.int32, device=device)
    assert torch.cuda.memory_allocated() - before == 41_943_040
    assert replay.trace_len.gpu.is_pinned()
    del matrix


def test_trace_lengths_are_int32_and_indexed_by_slot(device):
    slots = Slots(device)
    slots.admit(request([1], trace=[5]), request([2]), request([3], trace=[6, 7]))
    assert slots.replay.trace_len.np.dtype == np.int32
    assert slots.replay.trace_len.gpu.tolist() == [1, 0, 2, 0]
