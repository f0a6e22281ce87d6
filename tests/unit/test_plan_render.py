"""The loss mask, to the token: decoding the supervised tokens gives the assistant's own words and nothing else."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from layertap.rows import Conversation, Message, PromptCompletion, Row, RowError, Text, TokenIds
from worker.plan.render import MAX_MESSAGES, LoadedTokenizer, TokenizerError, check_ids

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<repo_name>' + m.role + '<file_sep>\n\n' + m.content | trim + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<repo_name>assistant<file_sep>\n\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
OPENS_THINKING = CHATML.replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif")
STRIPS_REASONING = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REFUSES = "{{ raise_exception('roles must alternate') }}"
TEMPLATES = [CHATML, LLAMA3, NO_GENERATION_PROMPT, OPENS_THINKING]

WithTemplate = Callable[[str | None], LoadedTokenizer]


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def with_template(plain: Any) -> WithTemplate:
    @functools.cache
    def made(template: str | None) -> LoadedTokenizer:
        tokenizer = copy.deepcopy(plain)
        tokenizer.chat_template = template
        return LoadedTokenizer(tokenizer)

    return made


def conversation(*turns: str, first_supervised: int = 0) -> Conversation:
    """Turns of user and assistant in alternation, the user first."""
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[i % 2], t) for i, t in enumerate(turns)), first_supervised)


def supervised(tokenizer: LoadedTokenizer, row: Row) -> list[str]:
    """The text of each unbroken run of supervised tokens."""
    assert not isinstance(row, TokenIds)
    ((ids, mask),) = tokenizer.encode([tokenizer.render(row, every_token=False)])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", TEMPLATES, ids=["chatml", "llama3", "no_generation_prompt", "opens_thinking"])
def test_only_the_assistants_words_and_end_tokens_are_supervised(template: str, with_template: WithTemplate) -> None:
    turns = ("Hi!", "Hello 👋🏽, größe", "And 漢字?", "def f(x):\n    return x  # 🙂", "Bye", "ok")
    found = supervised(with_template(template), conversation(*turns))
    assert [text.replace(" <|im_end|>", "<|im_end|>").strip() for text in found] == [
        f"{turn}<|im_end|>" for turn in turns[1::2]
    ]


def test_smollm2s_own_template_supervises_each_answer_exactly(smollm2: Path) -> None:
    tokenizer = LoadedTokenizer.load(smollm2)
    turns = ("Say it", "🙂", "Again", "indented:\n\n\tand  more \n", "More", "😀😀 x")
    assert supervised(tokenizer, conversation(*turns)) == [f"{turn}<|im_end|>" for turn in turns[1::2]]


def test_the_tokens_of_a_split_character_are_all_supervised(with_template: WithTemplate) -> None:
    tokenizer = with_template(CHATML)
    ((ids, mask),) = tokenizer.encode([tokenizer.render(conversation("x", "𓀀"), every_token=False)])
    assert mask.sum() > 3, "the character should need several tokens"
    assert tokenizer.decode(ids[mask == 1].tolist()) == "𓀀<|im_end|>"
    assert tokenizer.decode(ids[mask == 0].tolist()).endswith("<|im_start|>assistant\n\n")


def test_a_token_that_reaches_into_an_answer_is_supervised(with_template: WithTemplate) -> None:
    assert supervised(with_template(CHATML), conversation("x", "    a")) == ["\n    a<|im_end|>"]


def test_blank_only_tokens_inside_an_answer_are_supervised(with_template: WithTemplate) -> None:
    answer = "a        b\n\n\n    c   "
    assert supervised(with_template(CHATML), conversation("x", answer)) == [f"{answer}<|im_end|>"]


alphabet = st.characters(exclude_categories=["Cs", "Cn", "Co", "Cc"]) | st.sampled_from(" \n\t🙂漢é")


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    turns=st.lists(st.text(alphabet, min_size=1, max_size=12), min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0)
)
def test_any_answers_come_back_from_the_mask(turns: list[str], with_template: WithTemplate) -> None:
    tokenizer = with_template(CHATML)
    rendered = tokenizer.render(conversation(*turns), every_token=False)
    ((ids, mask),) = tokenizer.encode([rendered])
    # SmolLM2's vocabulary lacks a few bytes, so some characters cannot come back at all.
    assume(tokenizer.decode(ids.tolist()) == rendered.text)
    right = "".join(f"{turn}<|im_end|>" for turn in turns[1::2])
    found = tokenizer.decode(ids[mask == 1].tolist())
    # A token may hold the header's line break and the beginning of the answer, as "\n" + " " do: it is supervised.
    assert found.replace("\n", "") == right.replace("\n", "")
    assert 0 <= len(found) - len(right) <= len(turns) // 2


def test_reasoning_stripped_from_earlier_turns_is_a_row_error_that_names_the_remedy(
    with_template: WithTemplate,
) -> None:
    tokenizer = with_template(STRIPS_REASONING)
    turns = ("Hi", "<think>hm</think>Hello", "Bye", "<think>so</think>Ciao")
    with pytest.raises(RowError) as caught:
        tokenizer.render(conversation(*turns), every_token=False)
    assert caught.value.code == "template_rewrites_turns"
    assert "messages[1]" in caught.value.reason
    # The remedies that the reason names do help.
    assert supervised(tokenizer, conversation(*turns, first_supervised=3)) == ["<think>so</think>Ciao<|im_end|>"]
    assert tokenizer.render(conversation(*turns), every_token=True).spans[0][0] == 0
    assert len(supervised(tokenizer, conversation("Hi", "Hello", "Bye", "Ciao"))) == 2


def test_a_turn_that_the_template_changes_beyond_recognition_is_a_row_error(with_template: WithTemplate) -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(RowError) as caught:
        tokenizer.render(conversation("a", "b"), every_token=False)
    assert caught.value.code == "turn_not_found"


def test_a_conversation_may_begin_with_the_assistant(smollm2: Path) -> None:
    tokenizer = LoadedTokenizer.load(smollm2)
    row = Conversation((Message("assistant", "end"), Message("user", "a"), Message("assistant", "im_end")))
    assert supervised(tokenizer, row) == ["end<|im_end|>", "im_end<|im_end|>"]


def test_a_prompts_own_answers_are_not_supervised(with_template: WithTemplate) -> None:
    row = conversation("a", "b", "c", "d", first_supervised=3)
    assert supervised(with_template(CHATML), row) == ["d<|im_end|>"]


def test_a_conversation_without_a_chat_template_is_a_row_error(with_template: WithTemplate) -> None:
    with pytest.raises(RowError) as caught:
        with_template(None).render(conversation("a", "b"), every_token=False)
    assert caught.value.code == "no_chat_template"
    assert "text or input_ids" in caught.value.reason


def test_a_template_that_raises_is_a_row_error(with_template: WithTemplate) -> None:
    with pytest.raises(RowError) as caught:
        with_template(REFUSES).render(conversation("a", "b"), every_token=False)
    assert caught.value.code == "template_error"
    assert "roles must alternate" in caught.value.reason


def test_too_many_messages_are_a_row_error(with_template: WithTemplate) -> None:
    with pytest.raises(RowError) as caught:
        with_template(CHATML).render(conversation(*["a"] * (MAX_MESSAGES + 1)), every_token=False)
    assert caught.value.code == "too_many_messages"


def test_only_the_completion_is_supervised(with_template: WithTemplate) -> None:
    tokenizer = with_template(None)
    assert supervised(tokenizer, PromptCompletion("2 + 2 =", " 4 🙂")) == [" 4 🙂"]
    assert supervised(tokenizer, PromptCompletion("", "all of it")) == ["all of it"]
    assert supervised(tokenizer, PromptCompletion("nothing", "")) == []


def test_a_template_is_tokenised_without_added_special_tokens_and_plain_text_with_them(plain: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(plain)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    loaded = LoadedTokenizer(tokenizer)
    rows = [Text("one two"), conversation("a", "b"), PromptCompletion("one", " two")]
    (text, text_mask), (chat, _), (pair, pair_mask) = loaded.encode([loaded.render(r, every_token=False) for r in rows])
    assert loaded.decode(text.tolist()) == "<|im_start|>one two"
    assert loaded.decode(chat.tolist()).count("<|im_start|>") == 3
    assert pair.tolist() == text.tolist()
    assert pair_mask.tolist() == [0, 0, 1]
    assert text_mask[1:].all()


def test_token_ids_beyond_the_vocabulary_are_a_row_error() -> None:
    ids, mask = check_ids(TokenIds((3, 49151), None), 49152)
    assert (ids.dtype, ids.tolist(), mask.tolist()) == (np.int32, [3, 49151], [1, 1])
    with pytest.raises(RowError, match="token_id_range"):
        check_ids(TokenIds((49152,), None), 49152)


def test_a_folder_without_a_tokenizer_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        LoadedTokenizer.load(tmp_path)
