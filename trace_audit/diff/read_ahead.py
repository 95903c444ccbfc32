"""Reads the next piece while the one before it is worked on.

Decoding and operations on large arrays let go of the interpreter, so that threads keep two cores
busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_WORKERS = 2


def read_ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """The items, of which the next one is made in a thread; two are alive at a time.

    Args:
        items: Asked for one item after the other by that thread alone.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending = thread.submit(next, items, None)
        while (item := pending.result()) is not None:
            pending = thread.submit(next, items, None)
            yield item


def each_in_turn(items: Iterator[_Item], uses: Sequence[Callable[[_Item], object]]) -> None:
    """Calls every use with every item, read ahead; uses of one item run side by side.

    Args:
        items: See :func:`read_ahead`.
        uses: The slowest first. Each gets the items in order, one at a time.
    """
    with ThreadPoolExecutor(max_workers=_WORKERS) as threads:
        for item in read_ahead(items):
            # The list waits for all of them, and raises what they raised.
            list(threads.map(lambda use, item=item: use(item), uses))
