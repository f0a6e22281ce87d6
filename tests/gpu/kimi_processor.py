"""What SGLang asks of Kimi's processor when a server starts. Goes into the model folder; rows of text never call it."""

from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


class KimiTokenizer(PreTrainedTokenizerFast):
    """Has a name of its own: SGLang would load one of the generic class again, from files."""


class KimiProcessor:
    """Holds what SGLang's own processor for the family reads when it is made."""

    def __init__(self) -> None:
        words = Tokenizer(models.WordLevel({"<|media_pad|>": 0}, unk_token="<|media_pad|>"))
        self.tokenizer = KimiTokenizer(tokenizer_object=words, chat_template="{{ messages }}")
        self.image_processor = None
        media = {
            "patch_size": 14,
            "merge_kernel_size": 2,
            "in_patch_limit": 64,
            "patch_limit_on_one_side": 8,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        self.media_processor = SimpleNamespace(media_proc_cfg=media)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "KimiProcessor":
        """As transformers asks for it."""
        return cls()

    @classmethod
    def register_for_auto_class(cls) -> None:
        """As transformers asks for it."""
