"""Input rows: the five shapes a line of a data set may have, checked before anything is tokenised.

`parse_row` is the only judge of a line: the service runs it on upload, the worker again when it plans, and both come
to the same verdict. Whatever the bytes, it returns a `Row` or raises `RowError`; nothing of a row that would change
what the model reads is dropped silently.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line of a data set, without its line break. A longer one is a bad row, and nobody holds it in memory."""
MAX_NESTING = 100
"""Deepest nesting of a line; below the interpreter's own limit, so the verdict does not hang on the caller's stack."""
MAX_TOKEN_ID = 2**31 - 1
"""Token ids are stored as int32."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
}

_SHAPES = (
    'one of {"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]}, {"prompt", "completion"}, '
    '{"text"} and {"input_ids", "loss_mask"?}'
)
_RENDERED_KEYS = ("tools", "functions", "documents", "chat_template_kwargs")
"""Keys beside the messages that chat templates render. Ignoring them would extract states of another prompt."""
_RENDERED_MESSAGE_KEYS = (
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
    "reasoning",
    "reasoning_content",
    "thinking",
)


class RowError(ValueError):
    """A row that cannot be used. `code` is stable and meant for programs, `reason` for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; `role` is one of `ROLES`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """At least one message. Assistant turns before `first_supervised` (an index) are context, never supervised."""

    messages: tuple[Message, ...]
    first_supervised: int = 0


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """Plain strings, one right after the other; the completion is supervised. Not both empty."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Plain non-empty text, all of it supervised."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids, at least one, each within 0 … 2³¹ − 1; `loss_mask` is as long and of 0 and 1, None for all ones."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None


Row: TypeAlias = Conversation | PromptCompletion | Text | TokenIds


def parse_row(line: bytes) -> Row:
    """The row that one line of JSONL holds (a line break at its end is fine).

    A key whose value is null counts as absent. Extra keys (id, source, a `prompt` beside `messages`, a message's `name`
    or `tool_call_id`) are ignored, except those that chat templates render (tools, tool_calls, reasoning_content, …),
    which are refused unless empty. Raises `RowError` with one of the codes invalid_utf8, invalid_json, duplicate_key,
    too_deep, not_an_object, unknown_shape, ambiguous_shape, unsupported_field, wrong_type, wrong_role,
    empty_conversation, empty_row, lone_surrogate, token_id_range, mask_length, mask_value.
    """
    row = _load(line)
    shapes = ["prompt"] if "prompt" in row and "completion" in row else []
    shapes += [key for key in ("messages", "conversations", "text", "input_ids") if key in row]
    if len(shapes) > 1:
        raise RowError("ambiguous_shape", f"{' and '.join(shapes)} in one row; keep one of them")
    if not shapes:
        _no_shape(row)
    if "loss_mask" in row and shapes != ["input_ids"]:
        raise RowError("unsupported_field", f"loss_mask goes with input_ids, not with {shapes[0]}; remove it")
    return _READERS[shapes[0]](row)


def _load(line: bytes) -> dict[str, Any]:
    """The line's object, without its null members."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"byte {error.start} of the line is not UTF-8; save the file as UTF-8") from None
    if text.startswith("\ufeff"):
        raise RowError("invalid_json", "the line starts with a byte order mark; save the file as UTF-8 without one")
    try:
        row = _DECODER.decode(text)
        if text.count("{") + text.count("[") > MAX_NESTING:
            _check_nesting(row)
    except RowError:
        raise
    except json.JSONDecodeError as error:
        raise RowError("invalid_json", f"{error.msg} at character {error.pos} of the line") from None
    except RecursionError:
        raise RowError("too_deep", f"nested deeper than {MAX_NESTING} levels") from None
    except ValueError:
        raise RowError("invalid_json", "a number has more digits than can be read") from None
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"the line is a JSON {_kind(row)}; a row is an object, {_SHAPES}")
    return {key: value for key, value in row.items() if value is not None}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError("duplicate_key", f"key {_shown(twice)} stands twice in one object; keep one")
    return made


def _constant(name: str) -> NoReturn:
    raise RowError("invalid_json", f"{name} is not JSON; use null or a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _check_nesting(value: object) -> None:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inner: list[object] = []
        for container in level:
            if isinstance(container, dict):
                inner.extend(container.values())
            elif isinstance(container, list):
                inner.extend(container)
        if not inner:
            return
        level = inner
    raise RowError("too_deep", f"nested deeper than {MAX_NESTING} levels")


def _no_shape(row: Mapping[str, Any]) -> NoReturn:
    for have, lack in (("prompt", "completion"), ("completion", "prompt"), ("loss_mask", "input_ids")):
        if have in row:
            raise RowError("unknown_shape", f"{have} without {lack}; a row is {_SHAPES}")
    found = ", ".join(_shown(key) for key in list(row)[:5]) or "nothing"
    raise RowError("unknown_shape", f"found {found}; a row is {_SHAPES}")


def _messages_row(row: Mapping[str, Any]) -> Conversation:
    _refuse_rendered(row, _RENDERED_KEYS, "")
    return Conversation(_messages(row["messages"], "messages"))


def _sharegpt_row(row: Mapping[str, Any]) -> Conversation:
    _refuse_rendered(row, _RENDERED_KEYS, "")
    if row.get("system"):
        raise RowError("unsupported_field", 'system beside conversations; make it a first turn {"from": "system"}')
    turns = _list(row["conversations"], "conversations")
    if not turns:
        raise RowError("empty_conversation", "conversations is empty; give at least one turn")
    return Conversation(tuple(_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)))


def _prompt_row(row: Mapping[str, Any]) -> Row:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        _refuse_rendered(row, _RENDERED_KEYS, "")
        before = _messages(prompt, "prompt")
        return Conversation(before + _messages(completion, "completion"), first_supervised=len(before))
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("wrong_type", "one of prompt and completion is a list; give two strings or two message lists")
    pair = PromptCompletion(_string(prompt, "prompt"), _string(completion, "completion"))
    if not pair.prompt and not pair.completion:
        raise RowError("empty_row", "prompt and completion are both empty")
    return pair


def _text_row(row: Mapping[str, Any]) -> Text:
    text = _string(row["text"], "text")
    if not text:
        raise RowError("empty_row", "text is empty")
    return Text(text)


def _token_row(row: Mapping[str, Any]) -> TokenIds:
    ids = _integers(row["input_ids"], "input_ids")
    if not ids:
        raise RowError("empty_row", "input_ids is empty")
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise RowError("token_id_range", f"input_ids holds a value outside 0 to {MAX_TOKEN_ID}")
    if "loss_mask" not in row:
        return TokenIds(tuple(ids), None)
    mask = _integers(row["loss_mask"], "loss_mask")
    if len(mask) != len(ids):
        raise RowError("mask_length", f"loss_mask has {len(mask)} values for {len(ids)} input_ids; give one for each")
    if not {0, 1}.issuperset(mask):
        raise RowError("mask_value", "loss_mask holds a value other than 0 and 1")
    return TokenIds(tuple(ids), tuple(mask))


_READERS = {
    "messages": _messages_row,
    "conversations": _sharegpt_row,
    "prompt": _prompt_row,
    "text": _text_row,
    "input_ids": _token_row,
}


def _messages(value: object, where: str) -> tuple[Message, ...]:
    messages = _list(value, where)
    if not messages:
        raise RowError("empty_conversation", f"{where} is empty; give at least one message")
    return tuple(_message(message, f"{where}[{i}]") for i, message in enumerate(messages))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise RowError("wrong_type", f'{where} is a JSON {_kind(value)}; a message is {{"role", "content"}}')
    if len(value) > 2:
        _refuse_rendered(value, _RENDERED_MESSAGE_KEYS, where + ".")
        if value.get("weight", 1) not in (1, None):
            raise RowError(
                "unsupported_field", f"{where}.weight: turns cannot be weighted; use input_ids and loss_mask"
            )
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError("wrong_role", f"{where}.role is {_shown(role)}; it must be one of {', '.join(sorted(ROLES))}")
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    return Message(role, _string(content, f"{where}.content"))


def _part(value: object, where: str) -> str:
    if not isinstance(value, dict):
        raise RowError("wrong_type", f'{where} is a JSON {_kind(value)}; a part is {{"type": "text", "text"}}')
    if value.get("type") != "text":
        raise RowError("wrong_type", f"{where}.type is {_shown(value.get('type'))}; only text parts can be used")
    return _string(value.get("text"), f"{where}.text")


def _turn(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise RowError("wrong_type", f'{where} is a JSON {_kind(value)}; a turn is {{"from", "value"}}')
    if len(value) > 2:
        _refuse_rendered(value, _RENDERED_MESSAGE_KEYS, where + ".")
    speaker = value.get("from")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        allowed = ", ".join(sorted(SHAREGPT_ROLES))
        raise RowError("wrong_role", f"{where}.from is {_shown(speaker)}; it must be one of {allowed}")
    return Message(SHAREGPT_ROLES[speaker], _string(value.get("value"), f"{where}.value"))


def _refuse_rendered(value: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if value.get(key):
            raise RowError(
                "unsupported_field",
                f"{where}{key} would change the prompt and is not supported; render the row yourself and send text",
            )


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{where} is a JSON {_kind(value)}; it must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError("lone_surrogate", f"{where} holds half of a surrogate pair, which is no character") from None
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowError("wrong_type", f"{where} is a JSON {_kind(value)}; it must be a list")
    return value


def _integers(value: object, where: str) -> list[int]:
    items = _list(value, where)
    if not {int}.issuperset(map(type, items)):
        raise RowError("wrong_type", f"{where} holds something other than whole numbers")
    return items


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names[type(value)]


def _shown(value: object) -> str:
    """A value from the row, short and in ASCII, fit for an error message."""
    return ascii(value[:40]) if isinstance(value, str) else f"a JSON {_kind(value)}"
