"""What every side of a benchmark decodes: prompts, and how many tokens each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TOPICS = ["the sea", "prime numbers", "a lost key", "sorting a list", "winter", "bread", "Mars"]
QUESTIONS = [
    "Write a short story about {}.",
    "Explain {} to a child in three sentences.",
    "What do most people get wrong about {}? Give an example and say why it matters.",
    "List five facts about {}.",
    "Describe {} as a travel guide would, with one warning and one piece of advice at the end.",
]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts of token ids, and how many tokens each is continued by.

    Attributes:
        prompts: one a row.
        num_tokens: decoded in every row.
    """

    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int

    @property
    def rows(self) -> int:
        """Sequences, all of them in one batch."""
        return len(self.prompts)

    @property
    def total(self) -> int:
        """Tokens decoded in all rows."""
        return self.rows * self.num_tokens

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence at its end."""
        return self.longest_prompt + self.num_tokens

    @property
    def mean_contexts(self) -> list[float]:
        """Tokens that a decode step reads in each row, on average over the steps."""
        return [len(prompt) + self.num_tokens / 2 for prompt in self.prompts]


def random_prompts(rows: int, context: int, vocabulary_size: int) -> list[list[int]]:
    """Seeded ids, `context` a prompt; none of the first three, which are often special."""
    draw = np.random.default_rng(0)
    ids: list[list[int]] = draw.integers(3, vocabulary_size, (rows, context)).tolist()
    return ids


def text_prompts(directory: Path, rows: int) -> list[list[int]]:
    """Questions of several lengths in the ids of a model's own tokenizer."""
    from transformers import AutoTokenizer

    tokenize: Callable[[str], dict[str, Sequence[int]]] = AutoTokenizer.from_pretrained(directory)
    texts = [QUESTIONS[i % len(QUESTIONS)].format(TOPICS[i % len(TOPICS)]) for i in range(rows)]
    return [list(tokenize(text)["input_ids"]) for text in texts]
