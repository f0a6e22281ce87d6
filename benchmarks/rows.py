"""The rows that are measured with: the conversations of `examples/`, tokenised as a plan would."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layertap.rows import RowError, TokenIds, parse_row
from worker.plan.render import LoadedTokenizer

CONVERSATIONS = Path(__file__).resolve().parent.parent / "examples" / "conversations.jsonl"

Ids = npt.NDArray[np.int32]


def good_lines() -> list[bytes]:
    """Every line of the conversations that is a good row of messages."""
    return [line for line in CONVERSATIONS.read_bytes().splitlines() if b'"messages"' in line and _good(line)]


def tokenised(model: Path) -> list[Ids]:
    """Every good conversation, in order."""
    tokenizer = LoadedTokenizer.load(model)
    rendered = []
    for line in good_lines():
        row = parse_row(line)
        assert not isinstance(row, TokenIds)
        rendered.append(tokenizer.render(row, every_token=True))
    return [ids for ids, _ in tokenizer.encode(rendered)]


def spread(rows: Sequence[Ids], tokens: float, fewest: int) -> list[Ids]:
    """About `tokens` tokens of `rows`, at least `fewest` rows, spread evenly over them and in their order."""
    whole = sum(len(row) for row in rows)
    count = max(fewest, min(len(rows), round(len(rows) * tokens / whole)))
    return [rows[i * len(rows) // count] for i in range(count)]


def _good(line: bytes) -> bool:
    try:
        parse_row(line)
    except RowError:
        return False
    return True
