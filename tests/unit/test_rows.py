"""What `parse_row` takes, what it refuses, and that it does nothing else."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.rows import (
    MAX_NESTING,
    Conversation,
    Message,
    PromptCompletion,
    RowError,
    Text,
    TokenIds,
    parse_row,
)

HELLO = (Message("user", "Hi"), Message("assistant", "Hello 👋"))


def line(row: Any) -> bytes:
    return json.dumps(row).encode()


def refusal(data: bytes) -> RowError:
    with pytest.raises(RowError) as caught:
        parse_row(data)
    return caught.value


@pytest.mark.parametrize(
    ("row", "parsed"),
    [
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello 👋"}], "id": 7},
            Conversation(HELLO),
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                    {"role": "assistant", "content": "Hello 👋", "tool_calls": [], "name": "x", "weight": 1},
                ],
                "prompt": "a prompt beside messages is no second shape",
                "tools": None,
            },
            Conversation(HELLO),
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello 👋"}], "text": None},
            Conversation(HELLO),
        ),
        (
            {
                "prompt": [{"role": "user", "content": "Hi"}],
                "completion": [{"role": "assistant", "content": "Hello 👋"}],
            },
            Conversation(HELLO, first_supervised=1),
        ),
        ({"prompt": "2 + 2 = ", "completion": "4"}, PromptCompletion("2 + 2 = ", "4")),
        ({"text": "Once", "source": {"name": "a book"}}, Text("Once")),
        ({"input_ids": [5, 0, 2147483647]}, TokenIds((5, 0, 2147483647), None)),
        ({"input_ids": [5, 6], "loss_mask": [0, 1]}, TokenIds((5, 6), (0, 1))),
    ],
)
def test_every_shape_is_read(row: Any, parsed: Any) -> None:
    assert parse_row(line(row) + b"\n") == parsed


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_json"),
        (b'{"text": "a"', "invalid_json"),
        (b'{"text": NaN}', "invalid_json"),
        (b'{"text": "a", "x": -Infinity}', "invalid_json"),
        (b'{"input_ids": [' + b"9" * 5000 + b"]}", "invalid_json"),
        ("\ufeff{}".encode(), "invalid_json"),
        (b'{"text": "\xff"}', "invalid_utf8"),
        (b'{"text": "\xed\xa0\x80"}', "invalid_utf8"),
        (b'{"text": "\\ud83d"}', "lone_surrogate"),
        (b'{"text": "a", "text": "b"}', "duplicate_key"),
        (b'{"text": "a", "x": [{"y": 1, "y": 1}]}', "duplicate_key"),
        (b"[1]", "not_an_object"),
        (b"null", "not_an_object"),
        (b"{}", "unknown_shape"),
        (b'{"prompt": "a"}', "unknown_shape"),
        (b'{"text": "a", "messages": []}', "ambiguous_shape"),
        (b'{"text": "a", "loss_mask": [1]}', "unsupported_field"),
        (b'{"text": ""}', "empty_row"),
        (b'{"text": 1}', "wrong_type"),
        (b'{"prompt": "", "completion": ""}', "empty_row"),
        (b'{"prompt": "a", "completion": []}', "wrong_type"),
        (b'{"messages": []}', "empty_conversation"),
        (b'{"messages": {}}', "wrong_type"),
        (b'{"messages": ["a"]}', "wrong_type"),
        (b'{"messages": [{"role": "robot", "content": "a"}]}', "wrong_role"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "wrong_role"),
        (b'{"messages": [{"content": "a"}]}', "wrong_role"),
        (b'{"messages": [{"role": "user", "content": null}]}', "wrong_type"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "wrong_type"),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}', "unsupported_field"),
        (b'{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "unsupported_field"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "unsupported_field"),
        (b'{"conversations": [{"from": "nobody", "value": "a"}]}', "wrong_role"),
        (b'{"conversations": [{"from": "human", "value": "a"}], "system": "be kind"}', "unsupported_field"),
        (b'{"conversations": []}', "empty_conversation"),
        (b'{"input_ids": []}', "empty_row"),
        (b'{"input_ids": [1.0]}', "wrong_type"),
        (b'{"input_ids": [true]}', "wrong_type"),
        (b'{"input_ids": [-1]}', "token_id_range"),
        (b'{"input_ids": [2147483648]}', "token_id_range"),
        (b'{"input_ids": [1, 2], "loss_mask": [1]}', "mask_length"),
        (b'{"input_ids": [1], "loss_mask": [2]}', "mask_value"),
    ],
)
def test_a_bad_line_is_refused_by_a_stable_code(data: bytes, code: str) -> None:
    error = refusal(data)
    assert error.code == code
    assert error.reason


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_absurd_nesting_is_a_row_error(opening: bytes) -> None:
    assert refusal(opening * 100_000).code in ("too_deep", "invalid_json")
    closing = b"]" if opening == b"[" else b"}"
    inner = opening * 300 + b"0" + closing * 300
    assert refusal(b'{"text": "a", "x": ' + inner + b"}").code == "too_deep"


def test_the_verdict_on_nesting_does_not_hang_on_the_callers_stack() -> None:
    deep = MAX_NESTING - 1
    allowed = b'{"text": "a", "x": ' + b"[" * deep + b"]" * deep + b"}"
    refused = b'{"text": "a", "x": ' + b"[" * (deep + 2) + b"]" * (deep + 2) + b"}"

    def at_depth(frames: int) -> tuple[Any, str]:
        return at_depth(frames - 1) if frames else (parse_row(allowed), refusal(refused).code)

    assert at_depth(0) == at_depth(500) == (Text("a"), "too_deep")


def test_the_reason_names_the_place() -> None:
    error = refusal(b'{"messages": [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]}')
    assert "messages[1].role" in error.reason
    assert "'robot'" in error.reason
    assert "assistant" in error.reason


def test_a_reason_is_short_printable_ascii_whatever_the_row_holds() -> None:
    error = refusal(line({"messages": [{"role": "é\ud800\n" * 10_000, "content": "a"}]}))
    assert len(error.reason) < 300
    assert error.reason.isascii()
    assert error.reason.isprintable()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
KEYS = ["messages", "conversations", "prompt", "completion", "text", "input_ids", "loss_mask", "id", "tools"]
INNER = ["role", "content", "from", "value", "type", "text", "weight", "tool_calls"]
WORDS = ["user", "assistant", "human", "gpt", "text", "", "a", 0, 1, -1, 2**40, 1.5, None, True]
near_rows = st.dictionaries(
    st.sampled_from(KEYS),
    json_values
    | st.lists(st.sampled_from(WORDS), max_size=4)
    | st.lists(st.dictionaries(st.sampled_from(INNER), st.sampled_from(WORDS) | json_values, max_size=4), max_size=3),
    max_size=4,
)


def assert_row_or_row_error(data: bytes) -> None:
    found: object
    try:
        found = parse_row(data)
    except RowError as error:
        found = error
    assert isinstance(found, Conversation | PromptCompletion | Text | TokenIds | RowError)
    if isinstance(found, RowError):
        assert re.fullmatch(r"[a-z0-9_]+", found.code)
        assert found.reason


@given(st.binary())
def test_any_bytes_are_a_row_or_a_row_error(data: bytes) -> None:
    assert_row_or_row_error(data)


@given(json_values | near_rows, st.booleans())
def test_any_json_is_a_row_or_a_row_error(value: Any, escape: bool) -> None:
    assert_row_or_row_error(json.dumps(value, ensure_ascii=escape).encode("utf-8", "surrogatepass"))
