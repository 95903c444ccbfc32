"""The order of rows that every file of tokens keeps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def check_row_order(table: pa.Table, *, first_row: int = 0) -> None:
    """Holds a table to rows sorted by (sequence_index, step), none twice.

    Args:
        table: With both columns.
        first_row: Number of its first row, for the message.

    Raises:
        ValueError: They are not.
    """
    keys = table["sequence_index"].to_numpy().astype(np.int64) << 32
    keys += table["step"].to_numpy().astype(np.int64)
    if (np.diff(keys) <= 0).any():
        row = int(np.argmax(np.diff(keys) <= 0)) + 1
        raise ValueError(f"row {first_row + row} is not after the row before it")
