"""Tokenizers: prompts to ids once, and ids to bytes for the reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trace_audit.errors import InputError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trace_audit.storage.prompts import PromptEntry

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META_SPACE = "▁"


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer from its directory; neither the network nor remote code is used.

    Raises:
        ModelError: It has none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    hint = "Give the prompts as prompt_token_ids, or put the model's tokenizer files there."
    if not model_dir.is_dir():
        raise ModelError(f"The model directory {model_dir} does not exist.")
    try:
        return AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # transformers and tokenizers raise whatever the broken file made them stumble over.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"The tokenizer in {model_dir} cannot be loaded: {reason}", hint=hint
        ) from error


def render_prompt(tokenizer: PreTrainedTokenizerBase | None, entry: PromptEntry) -> list[int]:
    """The token ids of a prompt, at least one.

    Text gets the tokenizer's own special tokens, a chat its template with the generation prompt,
    and ids stay as they are.

    Args:
        tokenizer: May be None where the entry has ids.
        entry: A line of the prompts file.

    Raises:
        InputError: There is no chat template, it refuses the messages, or the prompt has no
            tokens.
        ModelError: The entry needs a tokenizer and there is none.
    """
    if entry.prompt_token_ids is not None:
        return entry.prompt_token_ids
    if tokenizer is None:
        raise ModelError(
            f"The prompt on line {entry.line_number} is text, and the model has no tokenizer.",
            hint="Give the prompts as prompt_token_ids.",
        )
    ids = _text_ids(tokenizer, entry) if entry.messages is None else _chat_ids(tokenizer, entry)
    if not ids:
        raise InputError(
            f"The prompt on line {entry.line_number} has no tokens.",
            hint="This tokenizer adds none of its own to an empty text.",
        )
    return ids


def begins_twice(tokenizer: PreTrainedTokenizerBase, prompt_token_ids: list[int]) -> bool:
    """Whether a prompt begins with two beginning-of-sequence tokens, which is seldom meant."""
    bos = tokenizer.bos_token_id
    return bos is not None and prompt_token_ids[:2] == [bos, bos]


def tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of ids that the tokenizer can give, its added tokens included."""
    size: int = max(tokenizer.get_vocab().values()) + 1
    return size


def vocabulary_rows(
    tokenizer: PreTrainedTokenizerBase, vocabulary_size: int
) -> tuple[list[bytes], list[bool]]:
    """The bytes of every id of the model's logits, and whether it is a control token.

    Byte-level tokens give their bytes, which need not be UTF-8 one by one; SentencePiece tokens
    give their text with the marker as a space, and their byte tokens that byte; added tokens are
    their text. An id without a token (a padded vocabulary) is empty, and a tokenizer's ids from
    `vocabulary_size` on are left out.

    Args:
        tokenizer: The model's.
        vocabulary_size: Width of the model's logits.
    """
    to_bytes = _piece_bytes(tokenizer)
    special_ids = set(tokenizer.all_special_ids)
    token_bytes = [b""] * vocabulary_size
    special = [False] * vocabulary_size
    for piece, token_id in tokenizer.get_vocab().items():
        if 0 <= token_id < vocabulary_size:
            token_bytes[token_id] = to_bytes(piece)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if 0 <= token_id < vocabulary_size:
            token_bytes[token_id] = token.content.encode("utf-8", "surrogatepass")
            special[token_id] = bool(token.special)
    for token_id in special_ids:
        if 0 <= token_id < vocabulary_size:
            special[token_id] = True
    return token_bytes, special


def _text_ids(tokenizer: PreTrainedTokenizerBase, entry: PromptEntry) -> list[int]:
    # A prompt longer than the tokenizer's own limit is the engine's to judge, not to be warned of.
    return list(tokenizer(entry.prompt, truncation=False, verbose=False)["input_ids"])


def _chat_ids(tokenizer: PreTrainedTokenizerBase, entry: PromptEntry) -> list[int]:
    if not tokenizer.chat_template:
        raise InputError(
            f"The prompt on line {entry.line_number} is a chat, and the model's tokenizer has no "
            "chat template.",
            hint="Give its text as prompt, or its ids as prompt_token_ids.",
        )
    try:
        return list(
            tokenizer.apply_chat_template(
                entry.messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    except Exception as error:
        # A template is a program: besides its own refusals it raises whatever the messages' shape
        # makes it stumble over.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"The chat template refuses the messages on line {entry.line_number}: {reason}"
        ) from error


def _piece_bytes(tokenizer: PreTrainedTokenizerBase) -> Any:
    """How a piece of this tokenizer's vocabulary becomes bytes, told from its decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _sentencepiece_bytes
    kinds = _decoder_kinds(json.loads(backend.to_str())["decoder"])
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _sentencepiece_bytes
    return lambda piece: str(piece).encode("utf-8", "surrogatepass")


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoder_kinds(inner) for inner in decoder["decoders"]))
    return {decoder["type"]}


def _byte_level_bytes(piece: str) -> bytes:
    table = _BYTE_OF_CHARACTER
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    # A token that was put into the vocabulary as plain text.
    return piece.encode("utf-8", "surrogatepass")


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return piece.replace(_META_SPACE, " ").encode("utf-8", "surrogatepass")


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE writes a byte as a printable character: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
