"""A prompts file is understood whole or refused with the line and the key that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trace_audit.errors import InputError
from trace_audit.storage.prompts import import_warnings, read_prompts


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_every_form(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path,
        {"prompt": "text\u2028more"},
        "",
        {"messages": chat, "id": "chat", "group_id": "g"},
        {"prompt_token_ids": [0, 2**31 - 1], "id": 7},
        {
            "prompt": "",
            "output_token_ids": [1, 2],
            "logprobs": [-1, -0.5],
            "score_mask": [True, False],
        },
    )
    text, messages, ids, imported = read_prompts(path)
    assert (text.prompt, text.sequence_id, text.group_id) == ("text\u2028more", "0", "0")
    assert (messages.messages, messages.sequence_id, messages.group_id) == (chat, "chat", "g")
    assert messages.line_number == 3
    assert messages.index == 1
    assert (ids.prompt_token_ids, ids.sequence_id) == ([0, 2**31 - 1], "7")
    assert (imported.prompt, imported.output_token_ids) == ("", [1, 2])
    assert (str(imported.logprobs), imported.score_mask) == ("[-1.0, nan]", [True, False])
    assert imported.sequence_id == "3"
    assert (text.output_token_ids, text.logprobs, text.score_mask) == (None, None, None)


def test_windows_line_ends_a_byte_order_mark_and_no_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}')
    assert [entry.prompt for entry in read_prompts(path)] == ["a", "b"]


PROMPT = {"prompt": "x"}
GIVEN = {**PROMPT, "output_token_ids": [1], "logprobs": [-1.0]}
WRONG: list[tuple[object, str]] = [
    ("{", "not JSON"),
    ('{"prompt": "x"} {"prompt": "y"}', "not JSON"),
    ("x", "not JSON"),
    ("1" * 5000, "number is too long"),
    ('{"prompt_token_ids": ' + "[" * 100_000, "nested too deeply"),
    ("[]", "JSON array, not an object"),
    ("null", "JSON null, not an object"),
    ("true", "JSON boolean, not an object"),
    ('{"prompt": "x", "prompt": "y"}', "the key 'prompt' is there twice"),
    ('{"messages": [{"role": "a", "role": "b"}]}', "the key 'role' is there twice"),
    ({**PROMPT, "max_tokens": 3}, "the key 'max_tokens' is unknown"),
    ({}, "none of them"),
    ({"id": "a"}, "none of them"),
    ({**PROMPT, "prompt_token_ids": [1]}, "has prompt and prompt_token_ids"),
    ({"prompt": 3}, "prompt must be a string, not 3"),
    ({"prompt": None}, "prompt must be a string, not null"),
    ('{"prompt": "a\\ud800"}', "half a surrogate pair at character 2"),
    ({"messages": []}, "messages must be a non-empty array"),
    ({"messages": "hi"}, "messages must be a non-empty array"),
    ({"messages": ["hi"]}, r"messages\[0\] must be an object with a role"),
    ({"messages": [{"role": "user"}, {"content": "x"}]}, r"messages\[1\] must be"),
    ({"messages": [{"role": 1}]}, r"messages\[0\].role must be a string"),
    (
        '{"messages": [{"role": "user", "content": [{"text": "\\udc00"}]}]}',
        r"messages\[0\].content.text has half",
    ),
    ({"prompt_token_ids": []}, "prompt_token_ids must be a non-empty array"),
    ({"prompt_token_ids": 3}, "prompt_token_ids must be a non-empty array"),
    ({"prompt_token_ids": [1, True]}, r"prompt_token_ids\[1\] must be an integer, not true"),
    ({"prompt_token_ids": [1.0]}, r"prompt_token_ids\[0\] must be an integer, not 1.0"),
    ({"prompt_token_ids": ["1"]}, r"prompt_token_ids\[0\] must be an integer, not '1'"),
    ({"prompt_token_ids": [[1]]}, r"prompt_token_ids\[0\] must be an integer"),
    ({"prompt_token_ids": [-1]}, r"prompt_token_ids\[0\] is -1, outside 0 to 2147483647"),
    ({"prompt_token_ids": [2**31]}, r"prompt_token_ids\[0\] is 2147483648, outside"),
    ({**PROMPT, "output_token_ids": []}, "output_token_ids must be a non-empty array"),
    ({**PROMPT, "output_token_ids": [None]}, r"output_token_ids\[0\] must be an integer"),
    ({**PROMPT, "logprobs": [-1]}, "logprobs needs output_token_ids"),
    ({**PROMPT, "output_token_ids": [1], "logprobs": []}, "logprobs has 0 entries"),
    ({**PROMPT, "output_token_ids": [1], "logprobs": None}, "logprobs must be an array"),
    ({**PROMPT, "output_token_ids": [1], "logprobs": [None]}, r"logprobs\[0\] must be a number"),
    ({**PROMPT, "output_token_ids": [1], "logprobs": [True]}, r"logprobs\[0\] must be a number"),
    ({**PROMPT, "output_token_ids": [1], "logprobs": [float("nan")]}, "must be finite, not nan"),
    ({**PROMPT, "output_token_ids": [1], "logprobs": [-float("inf")]}, "must be finite, not -inf"),
    ('{"prompt": "x", "output_token_ids": [1], "logprobs": [-1e999]}', "must be finite"),
    ('{"prompt": "x", "output_token_ids": [1], "logprobs": [-1' + "0" * 400 + "]}", "be finite"),
    ({**PROMPT, "scoring": {}}, "scoring needs logprobs beside it"),
    ({**GIVEN, "scoring": "raw"}, "scoring must be an object, not 'raw'"),
    ({**GIVEN, "scoring": None}, "scoring must be an object, not null"),
    ({**GIVEN, "scoring": {"mode": "cooked"}}, "scoring.mode = 'cooked' is not one of raw"),
    ({**GIVEN, "scoring": {"temprature": 1}}, "unknown key scoring.temprature"),
    ({**GIVEN, "scoring": {"mode": "processed", "temperature": 0}}, "must be at least 1e-06"),
    ({**GIVEN, "scoring": {"temperature": 0.7}}, "scoring.temperature = 0.7 has no effect"),
    ({**PROMPT, "score_mask": [True]}, "score_mask needs output_token_ids"),
    ({**PROMPT, "output_token_ids": [1, 2], "score_mask": [True]}, "score_mask has 1 entries"),
    ({**PROMPT, "output_token_ids": [1], "score_mask": [1]}, r"score_mask\[0\] must be true or"),
    ({**PROMPT, "output_token_ids": [1], "score_mask": [False]}, "no token to score"),
    ({**PROMPT, "id": ""}, "id must be a non-empty string or an integer"),
    ({**PROMPT, "id": 1.5}, "id must be a non-empty string or an integer, not 1.5"),
    ({**PROMPT, "id": True}, "id must be a non-empty string or an integer, not true"),
    ({**PROMPT, "id": None}, "id must be a non-empty string or an integer, not null"),
    ('{"prompt": "x", "id": "\\ud800"}', "id has half a surrogate pair"),
    ({**PROMPT, "group_id": []}, "group_id must be a non-empty string"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(InputError, match=f"prompts.jsonl, line 3: .*{message}") as caught:
        read_prompts(path)
    assert len(caught.value.message) < 300 + len(str(tmp_path))
    assert caught.value.message.endswith(".")


def test_the_nearest_key_is_offered(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_prompts(write(tmp_path, {"prompt_tokens_ids": [1]}))
    assert caught.value.hint == "Did you mean 'prompt_token_ids'?"


@pytest.mark.parametrize("first", [{**PROMPT, "id": "1"}, {**PROMPT, "id": 1}])
def test_an_id_is_used_once_defaults_included(tmp_path: Path, first: object) -> None:
    with pytest.raises(InputError, match="line 2: the id '1' is that of line 1 too"):
        read_prompts(write(tmp_path, first, PROMPT))


def test_every_wrong_line_is_named_at_once(tmp_path):
    good, bad = {"prompt": "a"}, {"promt": "a"}
    with pytest.raises(InputError, match=r"line 2: .*promt.*\. Line 4 is wrong too\.$"):
        read_prompts(write(tmp_path, good, bad, good, bad))
    with pytest.raises(InputError, match=r"line 1: .* Lines 2, 3, 4 are wrong too\.$"):
        read_prompts(write(tmp_path, bad, bad, {"id": "x"}, 3))
    with pytest.raises(InputError, match=r"Lines 2, 3, .*, 9 and 3 more are wrong too\.$"):
        read_prompts(write(tmp_path, *[bad] * 12))


def test_a_file_that_is_missing_a_directory_or_empty(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no prompts file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(InputError, match="is a directory"):
        read_prompts(tmp_path)
    for text in ("", "\n\n  \n"):
        (tmp_path / "p").write_text(text)
        with pytest.raises(InputError, match="is empty"):
            read_prompts(tmp_path / "p")


def test_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(InputError, match="line 2: byte 13 is not UTF-8"):
        read_prompts(tmp_path / "p")


def imported(tmp_path: Path, *logprobs: list[float] | None) -> list[str]:
    lines = [
        {**PROMPT, "output_token_ids": [1, 2]} | ({} if found is None else {"logprobs": found})
        for found in logprobs
    ]
    return import_warnings(read_prompts(write(tmp_path, *lines)))


def test_positive_logprobs_are_warned_about(tmp_path: Path) -> None:
    (warning,) = imported(tmp_path, [-1, 0.03], [0.125, 0.0])
    assert warning.startswith("2 imported logprobs are positive, the largest 0.125 on line 2")


def test_constant_logprobs_are_warned_about(tmp_path: Path) -> None:
    (warning,) = imported(tmp_path, [0.0, 0.0], [0, 0])
    assert warning.startswith("Every imported logprob is 0")


def test_logprobs_on_some_lines_are_a_subset(tmp_path: Path) -> None:
    (warning,) = imported(tmp_path, [-1, -2], None, None)
    assert warning.startswith("2 of 3 lines give no logprobs")


COLD = {"mode": "processed", "temperature": 0.7}


def test_a_line_can_say_how_its_logprobs_were_made(tmp_path: Path) -> None:
    lines = [{**GIVEN, "scoring": COLD}, {**GIVEN, "scoring": COLD | {"top_p": 1.0}}, PROMPT]
    first, second, plain = read_prompts(write(tmp_path, *lines))
    assert first.scoring is not None
    assert (first.scoring.mode, first.scoring.temperature) == ("processed", 0.7)
    assert second.scoring == first.scoring
    assert plain.scoring is None
    raw, same = read_prompts(
        write(tmp_path, {**GIVEN, "scoring": {}}, {**GIVEN, "scoring": {"mode": "processed"}})
    )
    assert raw.scoring is not None
    assert same.scoring is not None


@pytest.mark.parametrize("other", [{}, {"mode": "raw"}, COLD | {"temperature": 0.8}, None])
def test_every_line_must_say_the_same(tmp_path: Path, other: object) -> None:
    second = GIVEN if other is None else {**GIVEN, "scoring": other}
    for lines in (
        [{**GIVEN, "scoring": COLD}, PROMPT, second],
        [second, PROMPT, {**GIVEN, "scoring": COLD}],
    ):
        with pytest.raises(InputError, match="line 3: scoring is not that of line 1"):
            read_prompts(write(tmp_path, *lines))


@pytest.mark.parametrize("value", [0.0, -2.5, 0.25])
@pytest.mark.parametrize("lengths", [(2,), (1, 3)])
def test_any_constant_is_warned_about(
    tmp_path: Path, value: float, lengths: tuple[int, ...]
) -> None:
    lines = [{**PROMPT, "output_token_ids": [1] * n, "logprobs": [value] * n} for n in lengths]
    warnings = import_warnings(read_prompts(write(tmp_path, *lines)))
    assert any(w.startswith(f"Every imported logprob is {value:g}") for w in warnings)


def test_nothing_to_warn_about(tmp_path: Path) -> None:
    assert imported(tmp_path, [-1, -2], [-1, 0.0]) == []
    assert imported(tmp_path, None) == []


def test_a_token_that_is_not_scored_may_have_no_logprob(tmp_path: Path) -> None:
    line = {**PROMPT, "output_token_ids": [1, 2, 3], "score_mask": [True, False, True]}
    (entry,) = read_prompts(write(tmp_path, {**line, "logprobs": [-1, None, -2]}))
    assert entry.logprobs is not None
    assert [str(x) for x in entry.logprobs] == ["-1.0", "nan", "-2.0"]
    with pytest.raises(InputError, match=r"logprobs\[2\] must be a number, not null") as caught:
        read_prompts(write(tmp_path, {**line, "logprobs": [-1, -1, None]}))
    assert caught.value.hint == "Only a token that score_mask leaves out may have none."


def test_what_stands_beside_unscored_tokens_is_not_judged(tmp_path: Path) -> None:
    line = {**PROMPT, "output_token_ids": [1, 2, 3], "score_mask": [True, False, True]}
    warnings = [
        import_warnings(read_prompts(write(tmp_path, {**line, "logprobs": logprobs})))
        for logprobs in ([-1, 5.0, -2], [0, -7, 0], [0, None, 0])
    ]
    assert [len(found) for found in warnings] == [0, 1, 1]
    assert all(found[0].startswith("Every imported logprob is 0") for found in warnings[1:])
