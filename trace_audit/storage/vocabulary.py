"""The bytes of every token id, so that reports need neither a tokenizer nor the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trace_audit.storage.schema import VOCABULARY_SCHEMA


class Vocabulary:
    """Bytes and kind of every id of the model's logits.

    Args:
        table: In `VOCABULARY_SCHEMA`, a row an id.

    Raises:
        ValueError: The ids are not 0, 1, 2 and so on.
    """

    def __init__(self, table: pa.Table) -> None:
        ids = table["token_id"].to_numpy()
        if not np.array_equal(ids, np.arange(table.num_rows)):
            raise ValueError("the token ids are not in order")
        self._bytes = table["bytes"].combine_chunks()
        self._special = table["special"].combine_chunks()

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self._bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id; empty for an id that has no token.

        Raises:
            IndexError: The id is outside the vocabulary.
        """
        value: bytes = self._bytes[self._checked(token_id)].as_py()
        return value

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a control token.

        Raises:
            IndexError: The id is outside the vocabulary.
        """
        value: bool = self._special[self._checked(token_id)].as_py()
        return value

    def _checked(self, token_id: int) -> int:
        # A negative id must not count from the end.
        if not 0 <= token_id < self.size:
            raise IndexError(f"token id {token_id} is outside the vocabulary of {self.size} ids")
        return token_id


def vocabulary_table(token_bytes: Sequence[bytes], special: Sequence[bool]) -> pa.Table:
    """The vocabulary in `VOCABULARY_SCHEMA`, id by id."""
    assert len(token_bytes) == len(special)
    return pa.table(
        [
            pa.array(np.arange(len(token_bytes), dtype=np.int32)),
            pa.array(token_bytes, pa.binary()),
            pa.array(special, pa.bool_()),
        ],
        schema=VOCABULARY_SCHEMA,
    )
