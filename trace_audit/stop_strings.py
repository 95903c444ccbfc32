"""Stop strings: the engine has ids only, so the text is looked at here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_STOP_WINDOW = 16  # tokens decoded beyond a stop string's own bytes


@dataclass(frozen=True)
class StopStrings:
    """Whether a stop string appears in the text of the last tokens; every rank asks it.

    A token has at least one byte, but for special ones that decode to nothing.
    """

    stops: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, output_token_ids: Sequence[int]) -> bool:
        """Whether one of them does."""
        window = max(len(stop.encode()) for stop in self.stops) + _STOP_WINDOW
        text = self.tokenizer.decode(list(output_token_ids[-window:]), skip_special_tokens=False)
        return any(stop in text for stop in self.stops)
