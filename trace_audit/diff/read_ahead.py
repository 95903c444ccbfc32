"""Reads the next piece while the one before it is worked on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")


def read_ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """The items, of which the next one is made in a thread; two are alive at a time.

    Decoding and operations on large arrays let go of the interpreter, so that two cores are busy.

    Args:
        items: Asked for one item after the other by that thread alone.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending = thread.submit(next, items, None)
        while (item := pending.result()) is not None:
            pending = thread.submit(next, items, None)
            yield item
