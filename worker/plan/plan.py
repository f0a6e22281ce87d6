"""A plan: the whole data set streamed once, tokenised in batches, written down, and cut into shards.

Memory is bounded by one batch and the longest line allowed. Every line ends as a row of the tokenised rows or as a row
error, except blank lines and those that were bad at upload, which the service has listed already.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import BinaryIO

from layertap.layout import token_bytes
from layertap.rows import MAX_LINE_BYTES, RowError, TokenIds, parse_row
from layertap.schemas.jobs import Final, LossMask, Overflow
from layertap.schemas.tasks import MAX_ROW_ERRORS_PER_CALL, PlannedShard, PlanSpec, TaskRowProblem
from layertap.schemas.workers import ModelFacts
from worker.plan.policy import OverflowRefusedError, limit, settle
from worker.plan.render import Ids, LoadedTokenizer, Mask, Rendered, check_ids
from worker.plan.shards import ShardPacker
from worker.plan.tokens import TokenRowsWriter

BATCH_ROWS = 1024
BATCH_BYTES = 512 * 1024
"""Of JSON. Small enough that a batch takes well under a second on one core, so that progress is seen."""
_REASON_CHARS = 1000
_SKIPPED_BYTES = 1 << 20


class PlanError(Exception):
    """The plan cannot be made. `code` is for programs; `retryable` is false where another try would end the same."""

    def __init__(self, code: str, reason: str, retryable: bool) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.retryable = retryable


class PlanStoppedError(Exception):
    """The plan was told to stop. Its folder stays unreadable."""


@dataclass(frozen=True)
class PlanProgress:
    """How far a plan is: lines read, of them rows written and rows given up, and tokens written."""

    lines: int
    rows: int
    tokens: int
    row_errors: int


@dataclass(frozen=True)
class PlanResult:
    """A finished plan: the shards hold `rows` rows of `tokens` tokens; `row_errors` lines were given up."""

    shards: list[PlannedShard]
    rows: int
    tokens: int
    row_errors: int


@dataclass
class _Batch:
    """Lines being worked on. `texts` and `ready` are by line number; a line is in at most one of the three."""

    texts: dict[int, Rendered] = field(default_factory=dict)
    ready: dict[int, tuple[Ids, Mask]] = field(default_factory=dict)
    problems: dict[int, RowError] = field(default_factory=dict)


def make_plan(
    dataset_file: Path,
    tokens_dir: Path,
    spec: PlanSpec,
    layers: list[int],
    final: Final,
    model: ModelFacts,
    load_tokenizer: Callable[[], LoadedTokenizer],
    report_errors: Callable[[list[TaskRowProblem]], None],
    report_progress: Callable[[PlanProgress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> PlanResult:
    """Tokenises `dataset_file` into `tokens_dir` and packs its rows into shards.

    `load_tokenizer` is called by the first row that is more than token ids, so data sets of token ids need none.
    `report_errors` is given the row errors in order of their lines, a bounded list at a time; `report_progress` is
    called for every line that is looked at and after every batch; `should_stop` is asked before every batch. Raises
    `PlanError`, `PlanStoppedError`, `TokenizerError`, `OSError`.
    """
    tokenizer = cache(load_tokenizer)
    longest = limit(spec.max_tokens, model.max_row_tokens)
    per_token = token_bytes(len(layers), model.hidden_size, model.pins.dtype, final is not Final.NONE)
    packer = ShardPacker(per_token, spec.shard_bytes)
    errors = 0
    with TokenRowsWriter(tokens_dir) as writer:

        def seen(line: int) -> None:
            report_progress(PlanProgress(line + 1, writer.rows, writer.tokens, errors))

        for last_line, lines in _batches(dataset_file):
            if should_stop():
                raise PlanStoppedError
            batch = _tokenise(lines, tokenizer, model.vocab_size, spec.loss_mask, seen)
            _settle(batch, longest, spec.overflow, spec.loss_mask)
            for row_id, (ids, mask) in sorted(batch.ready.items()):
                writer.add(row_id, ids, mask)
                packer.add(len(ids))
            errors += len(batch.problems)
            _report(batch.problems, report_errors)
            seen(last_line)
        writer.finish()
        return PlanResult(packer.finish(), writer.rows, writer.tokens, errors)


def _batches(dataset_file: Path) -> Iterator[tuple[int, dict[int, bytes]]]:
    """The last line number of each batch (0-based), and its lines that are not blank."""
    lines: dict[int, bytes] = {}
    size, number = 0, -1
    with dataset_file.open("rb") as file:
        for number, line in enumerate(_bounded_lines(file)):
            if line.strip():
                lines[number] = line
            size += len(line)
            if len(lines) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield number, lines
                lines, size = {}, 0
    if number >= 0:
        yield number, lines


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Every line, with a blank one for each that the service refused as too long."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if line.endswith(b"\n") or len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        del line  # not held beside the pieces
        while (piece := file.readline(_SKIPPED_BYTES)) and not piece.endswith(b"\n"):
            pass
        yield b"\n"


def _tokenise(
    lines: dict[int, bytes],
    tokenizer: Callable[[], LoadedTokenizer],
    vocab_size: int,
    loss_mask: LossMask,
    seen: Callable[[int], None],
) -> _Batch:
    batch = _Batch()
    for row_id, line in lines.items():
        seen(row_id)
        try:
            row = parse_row(line)
        except RowError:
            continue  # listed by the service at upload
        try:
            if isinstance(row, TokenIds):
                batch.ready[row_id] = check_ids(row, vocab_size)
            else:
                batch.texts[row_id] = tokenizer().render(row, every_token=loss_mask is LossMask.ALL)
        except RowError as error:
            batch.problems[row_id] = error
    if batch.texts:
        _encode(batch, tokenizer())
    return batch


def _encode(batch: _Batch, tokenizer: LoadedTokenizer) -> None:
    try:
        encoded = tokenizer.encode(list(batch.texts.values()))
        batch.ready.update(zip(batch.texts, encoded, strict=True))
    except Exception:  # noqa: BLE001 - whatever one row did to the tokenizer must not cost the others
        _encode_singly(batch, tokenizer)


def _encode_singly(batch: _Batch, tokenizer: LoadedTokenizer) -> None:
    for row_id, rendered in batch.texts.items():
        try:
            (batch.ready[row_id],) = tokenizer.encode([rendered])
        except Exception as error:  # noqa: BLE001 - this row's own problem
            batch.problems[row_id] = RowError("tokenizer_error", f"the tokenizer refuses the row: {error}")


def _settle(batch: _Batch, longest: int, overflow: Overflow, loss_mask: LossMask) -> None:
    for row_id, (ids, mask) in list(batch.ready.items()):
        try:
            batch.ready[row_id] = settle(ids, mask, longest, overflow, loss_mask)
        except RowError as error:
            del batch.ready[row_id]
            batch.problems[row_id] = error
        except OverflowRefusedError as error:
            reason = f"line {row_id + 1}: {error}; raise max_tokens, or set overflow to truncate or skip"
            raise PlanError("row_too_long", reason, retryable=False) from error


def _report(problems: dict[int, RowError], report: Callable[[list[TaskRowProblem]], None]) -> None:
    listed = [
        TaskRowProblem(row_id=row_id, code=error.code, reason=error.reason[:_REASON_CHARS])
        for row_id, error in sorted(problems.items())
    ]
    for start in range(0, len(listed), MAX_ROW_ERRORS_PER_CALL):
        report(listed[start : start + MAX_ROW_ERRORS_PER_CALL])
