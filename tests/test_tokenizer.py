"""Prompts become ids once, and ids become the bytes that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from trace_audit.errors import InputError, ModelError
from trace_audit.storage.prompts import PromptEntry
from trace_audit.tokenizer import (
    begins_twice,
    load_tokenizer,
    render_prompt,
    tokenizer_size,
    vocabulary_rows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no bad roles') }}"
    "{% endif %}<s>{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
TEXT = "héllo wörld\n\t日本 🎉 <tool> a_b"


def save(directory: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_level(directory: Path, template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    """Every byte a token, two merges, three specials and an added token that is none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(alphabet)}
    vocabulary |= {"he": 256, "Ġw": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("Ġ", "w")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<é>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return load_tokenizer(save(directory, tokenizer, template))


def sentencepiece(directory: Path) -> PreTrainedTokenizerBase:
    """Pieces with the marker, byte tokens for the rest, and a BOS before every text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁he", "llo", "h", "e", "l", "o", "w", "r", "d", "ö", "▁▁", "<0xZZ>"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return load_tokenizer(save(directory, tokenizer))


def entry(**form: Any) -> PromptEntry:
    return PromptEntry(index=0, line_number=4, sequence_id="0", group_id="0", **form)


def joined(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> bytes:
    token_bytes, _ = vocabulary_rows(tokenizer, tokenizer_size(tokenizer))
    return b"".join(token_bytes[i] for i in ids)


def test_byte_level_tokens_are_their_bytes(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    token_bytes, special = vocabulary_rows(tokenizer, tokenizer_size(tokenizer))
    assert sorted(token_bytes[:256]) == [bytes([b]) for b in range(256)]
    assert token_bytes[256:258] == [b"he", b" w"]
    assert token_bytes[258:] == [b"<s>", b"</s>", "<é>".encode(), b"<tool>"]
    assert special == [False] * 258 + [True, True, True, False]
    ids = render_prompt(tokenizer, entry(prompt=TEXT))
    assert joined(tokenizer, ids) == TEXT.encode()
    assert 261 in ids


def test_sentencepiece_tokens_are_their_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    token_bytes, special = vocabulary_rows(tokenizer, tokenizer_size(tokenizer))
    assert token_bytes[:3] == [b"<unk>", b"<s>", b"</s>"]
    assert token_bytes[3:259] == [bytes([b]) for b in range(256)]
    assert token_bytes[259:262] == [b" ", b" he", b"llo"]
    assert token_bytes[-2:] == [b"  ", b"<0xZZ>"]
    assert [i for i, flag in enumerate(special) if flag] == [0, 1, 2]
    ids = render_prompt(tokenizer, entry(prompt=TEXT))
    assert joined(tokenizer, ids) == b"<s> " + TEXT.encode()


def test_a_vocabulary_wider_or_narrower_than_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    size = tokenizer_size(tokenizer)
    assert size == 262
    wide, wide_special = vocabulary_rows(tokenizer, size + 10)
    assert wide[size:] == [b""] * 10
    assert wide_special[size:] == [False] * 10
    narrow, narrow_special = vocabulary_rows(tokenizer, 259)
    assert (narrow, narrow_special) == (wide[:259], wide_special[:259])


def test_text_gets_the_tokenizers_own_special_tokens(tmp_path: Path) -> None:
    plain = byte_level(tmp_path / "plain")
    assert joined(plain, render_prompt(plain, entry(prompt="he"))) == b"he"
    with_bos = sentencepiece(tmp_path / "bos")
    assert render_prompt(with_bos, entry(prompt="he"))[0] == 1
    assert render_prompt(with_bos, entry(prompt="")) == [1, 259] or render_prompt(
        with_bos, entry(prompt="")
    ) == [1]


def test_a_long_text_is_not_cut(tmp_path: Path) -> None:
    byte_level(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 8}))
    tokenizer = load_tokenizer(tmp_path)
    assert len(render_prompt(tokenizer, entry(prompt="x" * 100))) == 100


def test_a_chat_goes_through_the_template_with_the_generation_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = render_prompt(tokenizer, entry(messages=[{"role": "user", "content": "hé"}]))
    assert joined(tokenizer, ids) == "<s>user:hé<s>assistant:".encode()
    assert ids[0] == 258
    assert not begins_twice(tokenizer, ids)


def test_a_doubled_bos_is_seen(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert begins_twice(tokenizer, render_prompt(tokenizer, entry(prompt="<s>he")))
    assert not begins_twice(tokenizer, render_prompt(tokenizer, entry(prompt="he")))


def test_ids_stay_as_they_are(tmp_path: Path) -> None:
    assert render_prompt(None, entry(prompt_token_ids=[5, 1, 1])) == [5, 1, 1]


def test_a_chat_without_a_template(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, template=None)
    with pytest.raises(InputError, match=r"line 4 is a chat, and .* no chat template"):
        render_prompt(tokenizer, entry(messages=[{"role": "user", "content": "x"}]))


def test_a_template_that_refuses_or_stumbles(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    with pytest.raises(InputError, match="messages on line 4: no bad roles"):
        render_prompt(tokenizer, entry(messages=[{"role": "bad", "content": "x"}]))
    with pytest.raises(InputError, match="chat template refuses the messages on line 4"):
        render_prompt(tokenizer, entry(messages=[{"role": "user", "content": 3}]))


def test_a_prompt_without_tokens(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 4 has no tokens"):
        render_prompt(byte_level(tmp_path), entry(prompt=""))


def test_text_without_a_tokenizer() -> None:
    with pytest.raises(ModelError, match="line 4 is text, and the model has no tokenizer"):
        render_prompt(None, entry(prompt="x"))


def test_a_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    byte_level(tmp_path / "half")
    text = (tmp_path / "half" / "tokenizer.json").read_text()
    (tmp_path / "half" / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "half")
