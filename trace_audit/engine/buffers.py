"""Host-to-device state: staged row writes, and small host-owned arrays the device reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.kernels.runtime import to_device
from trace_audit.kernels.trace_replay import scatter_values

_NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}
_NUM_UVA_BUFFERS = 2


class StagedWriteTensor:
    """A device matrix whose rows are written in batches: stage on the host, flush by one kernel.

    Args:
        num_rows: rows.
        row_len: columns.
        dtype: int32, int64 or float32.
        device: where `.gpu` lives.
    """

    def __init__(
        self, num_rows: int, row_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype not in _NUMPY_DTYPES:
            raise ValueError(f"StagedWriteTensor holds int32, int64 or float32, not {dtype}")
        self.gpu = torch.zeros(num_rows, row_len, dtype=dtype, device=device)
        self._np_dtype = _NUMPY_DTYPES[dtype]
        self._staged: dict[int, tuple[int, npt.NDArray[np.generic]]] = {}

    @property
    def num_staged(self) -> int:
        """Writes waiting for the next flush."""
        return len(self._staged)

    def stage_write(
        self, row: int, start: int, values: Sequence[int] | npt.NDArray[np.generic]
    ) -> None:
        """Stage `values` for columns start.. of `row`; an empty write stages nothing.

        Raises:
            ValueError: the write leaves the row, or the row already has one in this flush.
        """
        num_rows, row_len = self.gpu.shape
        if len(values) == 0:
            return
        if not 0 <= row < num_rows:
            raise ValueError(f"row {row} is outside the {num_rows} rows")
        if start < 0 or start + len(values) > row_len:
            raise ValueError(
                f"a write of {len(values)} values at column {start} leaves the row of {row_len}"
            )
        if row in self._staged:
            raise ValueError(f"row {row} already has a write in this flush")
        self._staged[row] = (start, np.asarray(values, dtype=self._np_dtype))

    def apply_writes(self) -> None:
        """Flush what is staged with one launch; nothing staged is no launch."""
        if not self._staged:
            return
        row_len = self.gpu.shape[1]
        destinations = np.concatenate(
            [
                np.arange(len(values), dtype=np.int64) + (row * row_len + start)
                for row, (start, values) in self._staged.items()
            ]
        )
        values = np.concatenate([values for _, values in self._staged.values()])
        device = self.gpu.device
        scatter_values(self.gpu, to_device(destinations, device), to_device(values, device))
        self._staged.clear()


class UvaBackedTensor:
    """A small array owned by the host (`.np`) that kernels read through unified addressing.

    On CUDA `.gpu` is a pinned CPU tensor that Triton kernels take as it is; it is one of a few
    rotating buffers, so the host never rewrites one that queued work still reads. On a CPU it is
    a plain tensor. `.gpu` must be read again after each `copy_to_uva`.

    Args:
        size: elements.
        dtype: int32, int64 or float32.
        device: the device whose kernels read it.
        fixed_address: on CUDA, have `.gpu` be one tensor on the device that every `copy_to_uva`
            copies to: a recorded graph reads the address that it was recorded with.
    """

    def __init__(
        self,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fixed_address: bool = False,
    ) -> None:
        on_cuda = device.type == "cuda"
        count = _NUM_UVA_BUFFERS if on_cuda else 1
        self.np = np.zeros(size, dtype=_NUMPY_DTYPES[dtype])
        self._buffers = [torch.zeros(size, dtype=dtype, pin_memory=on_cuda) for _ in range(count)]
        self._last_use: list[torch.cuda.Event | None] = [None] * count
        self._current = 0
        self._on_cuda = on_cuda
        is_copied = on_cuda and fixed_address
        self._copy = torch.zeros(size, dtype=dtype, device=device) if is_copied else None

    @property
    def gpu(self) -> torch.Tensor:
        """The buffer that holds the last copy, [size]."""
        return self._buffers[self._current] if self._copy is None else self._copy

    @property
    def nbytes(self) -> int:
        """Bytes of all rotating buffers, and of the copy on the device."""
        copied = 0 if self._copy is None else self._copy.nbytes
        return copied + sum(b.nbytes for b in self._buffers)

    def copy_to_uva(self) -> torch.Tensor:
        """Publish `.np` to the device and return the new `.gpu`."""
        if self._on_cuda:
            self._rotate()
        current = self._buffers[self._current]
        current.numpy()[:] = self.np
        if self._copy is not None:
            self._copy.copy_(current, non_blocking=True)
        return self.gpu

    def _rotate(self) -> None:
        superseded = torch.cuda.Event()
        superseded.record()
        self._last_use[self._current] = superseded
        self._current = (self._current + 1) % len(self._buffers)
        last_use = self._last_use[self._current]
        if last_use is not None:
            last_use.synchronize()
