from __future__ import annotations

from collections.abc import Iterator

import pytest

from trace_audit.diff.read_ahead import each_in_turn


def test_every_use_gets_every_item_in_order() -> None:
    seen: list[list[int]] = [[], [], []]
    each_in_turn(iter(range(1, 50)), [found.append for found in seen])
    assert seen == [list(range(1, 50))] * 3


def test_what_a_use_raises_is_raised() -> None:
    seen: list[int] = []

    def refuse(item: int) -> None:
        if item == 2:
            raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        each_in_turn(iter([1, 2, 3]), [refuse, seen.append])
    assert seen == [1, 2]


def test_what_reading_raises_is_raised_after_what_was_read() -> None:
    seen: list[int] = []

    def items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        each_in_turn(items(), [seen.append])
    assert seen == [1]
