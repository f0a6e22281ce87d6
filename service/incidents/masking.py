"""Secrets in text, found by what stands before them or by their own shape, and replaced by `***`.

A second line of defence behind the worker's own: what looks like a secret is masked even where it may be none. Every
quantifier is bounded, so that no text takes more than linear time.
"""

import re
from collections.abc import Iterable
from typing import Any

from layertap.schemas.incidents import Evidence

MASK = "***"
_SHORTEST_KNOWN = 6
"""Characters below which a known secret is not looked for: it would be found in any word."""

# Only how a name ends is looked at, so that the search starts at its few letters and not at every word.
_NAME = (
    r"(?:(?<![A-Za-z0-9])(?:TOKEN|PASSWORD|SECRET|CREDENTIALS?)"
    r"|(?i:(?:api|access|secret|private)[_-]?key(?:_id)?"
    r"|(?:hf|hub|auth|access|api|refresh|session|bearer|layertap)[_-]token"
    r"|(?<![a-z0-9])(?:secret|password|passwd)))"
)
_VALUE = r"""(?:(?<=")[^"\n]{1,4096}|(?<=')[^'\n]{1,4096}|[^\s'",;]{1,4096})"""
_NONE = r"(?!(?:None|null)\b)"
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"""((?<![\w-])--(?i:[\w-]{{0,40}}(?:api-?key|token|secret|password))['"]?[\s=:,]{{1,4}}['"]?){_NONE}{_VALUE}""",
        rf"""((?i:authorization)['"]?\s{{0,4}}[:=]\s{{0,4}}['"]?(?:\w{{1,20}}\s{{1,4}})?){_VALUE}""",
        rf"""((?i:\bbearer)\s{{1,4}}['"]?){_VALUE}""",
        rf"""({_NAME}['"]?\s{{0,4}}[:=]\s{{0,4}}['"]?){_NONE}{_VALUE}""",
        r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/:@]{0,200}:)[^\s/@]{1,500}(?=@)",
        r"(\b)(?:hf_|sk-|gh[opsru]_)[A-Za-z0-9_-]{16,200}",
        r"(\b)(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"(\b)eyJ[\w-]{8,4096}\.[\w-]{8,4096}\.[\w-]{8,4096}",
    )
)
_SECRET_NAME = re.compile(_NAME + "$")


def masked(text: str, known: Iterable[str] = ()) -> str:
    """The text without what looks like a secret, and without those that are `known`."""
    for secret in known:
        if len(secret) >= _SHORTEST_KNOWN:
            text = text.replace(secret, MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def masked_evidence(evidence: Evidence, known: Iterable[str] = ()) -> Evidence:
    """The evidence with every text of it masked."""
    known = tuple(known)
    return Evidence.model_validate(_each(evidence.model_dump(), known))


def _each(value: Any, known: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return masked(value, known)
    if isinstance(value, list):
        return [_each(item, known) for item in value]
    if isinstance(value, dict):
        return {
            name: MASK if isinstance(item, str) and item and _SECRET_NAME.search(name) else _each(item, known)
            for name, item in value.items()
        }
    return value
