"""Which distribution logprobs are of, however a configuration or a prompts file says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trace_audit.config.model import ScoringConfig
from trace_audit.config.validate import validate
from trace_audit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The softmax of logits / temperature, of which top_k and then top_p leave a part.

    Attributes:
        temperature: at least `MIN_TEMPERATURE`.
        top_k: most likely ids kept; 0: all.
        top_p: mass of the smallest set of most likely ids kept; 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_raw(self) -> bool:
        """Whether it is the softmax of the logits as they are."""
        return self.temperature == 1 and not self.is_filtered

    @property
    def is_filtered(self) -> bool:
        """Whether ids can have probability 0 because others are likelier."""
        return self.top_k > 0 or self.top_p < 1

    def within(self, vocabulary_size: int) -> Distribution:
        """The same, with a top_k that keeps every id told as none."""
        return self if self.top_k < vocabulary_size else replace(self, top_k=0)

    def __str__(self) -> str:
        parts = [f"temperature {self.temperature:g}"] if self.temperature != 1 else []
        parts += [f"top_k {self.top_k}"] if self.top_k else []
        parts += [f"top_p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join(parts) or "raw"


RAW = Distribution()


def distribution_of(scoring: ScoringConfig) -> Distribution:
    """What `[scoring]` asks for; the other keys count only where its mode is processed."""
    if scoring.mode == "raw":
        return RAW
    return Distribution(temperature=scoring.temperature, top_k=scoring.top_k, top_p=scoring.top_p)


def check_scoring(scoring: ScoringConfig) -> None:
    """Refuse keys that would have no effect.

    Raises:
        ConfigError: a key of the processed mode is set in the raw one.
    """
    if scoring.mode != "raw":
        return
    neutral = ScoringConfig()
    for key in ("temperature", "top_p", "top_k"):
        value = getattr(scoring, key)
        if value != getattr(neutral, key):
            raise ConfigError(
                f'scoring.{key} = {value} has no effect with scoring.mode = "raw"',
                hint='set scoring.mode = "processed", or leave the key out',
            )


def read_scoring(values: Mapping[str, Any]) -> ScoringConfig:
    """A `[scoring]` table from plain values, checked as in a configuration.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or it would have no effect.
    """
    scoring = validate({"name": "scoring", "scoring": values}).scoring
    check_scoring(scoring)
    return scoring
