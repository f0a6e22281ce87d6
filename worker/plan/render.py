"""Rows become text and the spans of it that are supervised; text and spans become token ids and a loss mask.

A conversation is rendered once, whole, with the model's chat template. An assistant turn's span runs from the first
character after the generation prompt to the end of its end-of-turn token. A token is supervised if any of its
characters is: the tokens of a byte-level tokenizer may share one.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layertap.rows import Conversation, Message, PromptCompletion, RowError, Text, TokenIds

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Span = tuple[int, int]

MAX_MESSAGES = 1024
"""Longest conversation. Every supervised turn is rendered with all before it, so time grows with the square."""


class TokenizerError(Exception):
    """The model's tokenizer cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text to tokenise, its supervised character spans, ascending, and whether the tokenizer adds special tokens."""

    text: str
    spans: tuple[Span, ...]
    add_special_tokens: bool


class LoadedTokenizer:
    """A model's fast tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so tokens cannot be traced to characters; "
                "add a tokenizer.json to the model folder, or send input_ids rows"
            )
        self._tokenizer = tokenizer
        self._backend = _untrimmed(tokenizer.backend_tokenizer)
        self.has_chat_template = bool(tokenizer.chat_template)
        self._end_tokens = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())
        self._prompts_generation = self.has_chat_template and self._probe_generation_prompt()

    @staticmethod
    def load(folder: Path) -> "LoadedTokenizer":
        """The tokenizer of the model at `folder`, from its files alone. Raises `TokenizerError` if it does not load."""
        try:
            return LoadedTokenizer(_tokenizer_class(folder).from_pretrained(folder, local_files_only=True))
        except (OSError, ValueError, KeyError, ImportError) as error:
            remedy = "add a tokenizer.json to the model folder, or send input_ids rows"
            raise TokenizerError(f"the tokenizer in {folder} does not load: {error}; {remedy}") from error

    def render(self, row: Conversation | PromptCompletion | Text, every_token: bool) -> Rendered:
        """The row as text. `every_token`: the caller supervises all of it, so no turn needs to be found.

        Plain text and prompt + completion get the tokenizer's special tokens (a leading BOS where the model has one),
        as a serving engine gives them to a text prompt; a chat template writes its own. Raises `RowError`.
        """
        if isinstance(row, Text):
            return Rendered(row.text, ((0, len(row.text)),), add_special_tokens=True)
        if isinstance(row, PromptCompletion):
            text = row.prompt + row.completion
            return Rendered(text, ((len(row.prompt), len(text)),), add_special_tokens=True)
        if not self.has_chat_template:
            raise RowError("no_chat_template", "the model has no chat template; send text or input_ids rows instead")
        if len(row.messages) > MAX_MESSAGES:
            raise RowError("too_many_messages", f"{len(row.messages)} messages; at most {MAX_MESSAGES} fit one row")
        messages = [{"role": m.role, "content": m.content} for m in row.messages]
        whole = self._template(messages)
        if every_token:
            return Rendered(whole, ((0, len(whole)),), add_special_tokens=False)
        spans = [
            self._turn_span(whole, messages, i, message)
            for i, message in enumerate(row.messages)
            if message.role == "assistant" and i >= row.first_supervised
        ]
        return Rendered(whole, tuple(spans), add_special_tokens=False)

    def encode(self, rendered: Sequence[Rendered]) -> list[tuple[Ids, Mask]]:
        """Token ids and loss mask of each text, in order; many texts a call, shared out to all cores."""
        made: list[tuple[Ids, Mask] | None] = [None] * len(rendered)
        for special in (False, True):
            chosen = [i for i, r in enumerate(rendered) if r.add_special_tokens is special]
            texts = [rendered[i].text for i in chosen]
            for i, encoding in zip(chosen, self._backend.encode_batch(texts, add_special_tokens=special), strict=True):
                made[i] = _masked(encoding, rendered[i])
        return [pair for pair in made if pair is not None]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _template(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
        except Exception as error:  # a template is code, and may raise anything
            raise RowError("template_error", f"the chat template refuses the row: {str(error)[:500]}") from error

    def _probe_generation_prompt(self) -> bool:
        """Whether the template knows `add_generation_prompt`: one that does not cannot tell where a header ends."""
        probe = [{"role": "user", "content": "a"}]
        try:
            return self._template(probe, prompt=True) != self._template(probe)
        except RowError:
            return True

    def _turn_span(self, whole: str, messages: list[dict[str, str]], i: int, message: Message) -> Span:
        upto = whole if i + 1 == len(messages) else self._template(messages[: i + 1])
        if not whole.startswith(upto):
            raise RowError(
                "template_rewrites_turns",
                f"the chat template renders messages[{i}] in another way once more turns follow; "
                'send the turns before the last as "prompt" and the last as "completion", or use loss_mask "all"',
            )
        end = self._end_of_turn(upto)
        if i and self._prompts_generation:
            header = self._template(messages[:i], prompt=True)
            if len(header) <= end and whole.startswith(header):
                return len(header), end
        return self._find_content(whole[:end], message.content, i), end

    def _end_of_turn(self, upto: str) -> int:
        """Where the turn ends: with its end-of-turn token. Blanks after that belong to the template."""
        bare = upto.rstrip()
        return len(bare) if bare.endswith(self._end_tokens) else len(upto)

    def _find_content(self, turn: str, content: str, i: int) -> int:
        """The turn's start, for want of a generation prompt: where its own text begins, back from the end."""
        bare, wanted = turn.rstrip(), content.strip()
        for token in ("", *sorted((t for t in self._end_tokens if bare.endswith(t)), key=len, reverse=True)):
            body = bare.removesuffix(token).rstrip()
            if wanted and body.endswith(wanted):
                return len(body) - len(wanted)
        raise RowError(
            "turn_not_found",
            f"messages[{i}] cannot be found in what the chat template made of it; send text or input_ids",
        )


def check_ids(row: TokenIds, vocab_size: int) -> tuple[Ids, Mask]:
    """Ids as they came, and their mask, all ones by default. Raises `RowError` for an id that the model lacks."""
    ids = np.array(row.input_ids, dtype=np.int32)
    if int(ids.max()) >= vocab_size:
        raise RowError("token_id_range", f"input_ids holds {int(ids.max())}; this model's ids end at {vocab_size - 1}")
    mask = np.ones(len(ids), np.uint8) if row.loss_mask is None else np.array(row.loss_mask, dtype=np.uint8)
    return ids, mask


def _masked(encoding: Any, rendered: Rendered) -> tuple[Ids, Mask]:
    ids = np.array(encoding.ids, dtype=np.int32)
    n = len(ids)
    flat = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64, count=2 * n)
    starts, ends = flat[::2], flat[1::2]
    mask = np.zeros(n, np.uint8)
    for start, end in rendered.spans:
        mask |= (starts < end) & (ends > start)
    return ids, mask


def _untrimmed(backend: Any) -> Any:
    """A copy that neither truncates nor pads, and whose offsets are those of the whole token.

    Byte-level post-processors trim blanks off a token's offsets, all of them where it is nothing but blanks.
    """
    import tokenizers

    spec = json.loads(backend.to_str())
    processor = spec["post_processor"] or {}
    for part in (processor, *processor.get("processors", ())):
        if "trim_offsets" in part:
            part["trim_offsets"] = False
    spec["truncation"] = spec["padding"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _tokenizer_class(folder: Path) -> Any:
    """The class that `AutoTokenizer` would take. Naming the plain one directly saves the 8 s of importing torch."""
    import transformers

    try:
        named = json.loads((folder / "tokenizer_config.json").read_bytes()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        named = None
    plain: Callable[..., Any] = transformers.PreTrainedTokenizerFast
    return plain if named in ("TokenizersBackend", "PreTrainedTokenizerFast") else transformers.AutoTokenizer
