"""Upload and plan of conversations: how fast rows are checked, and how fast they become tokens.

Upload: `POST /v1/datasets` of about 100 MB, against doing the least of it in one local loop: read, hash, parse each
line as JSON, write, flush. Plan: the worker's plan process, against templating and tokenising the same rows, nothing
else (no loss mask, no files, no shards).
"""

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks import service_process
from benchmarks.pairs import Budget, Rate, Ratio, Result, in_turn, rate, ratio, timed
from benchmarks.rows import good_lines
from layertap.client import Client
from layertap.schemas.jobs import Final, LossMask, Overflow
from layertap.schemas.tasks import PlanSpec
from worker import models
from worker.plan.messages import PlanRequest, PlanResultLine
from worker.plan.process import plan_lines

BOUND_SECONDS = 170.0
UPLOAD_BYTES = 100_000_000
PLAN_ROWS = 4000
_UPLOADS = Budget(seconds=30, fewest=3, most=5)
_PLANS = Budget(seconds=40, fewest=3, most=5)
_QUIET_SECONDS = 60.0


async def measure(model: Path) -> list[Result]:
    """Rounds of uploads, then rounds of plans. The rows are the example conversations, each made unlike the others."""
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as name:
        folder = Path(name)
        file, rows = _conversations(folder / "rows.jsonl", UPLOAD_BYTES, None)
        size = file.stat().st_size
        with service_process.running(folder) as service:
            uploads = _Uploads(service.url, file, rows, folder / "copy.jsonl")
            taken = await in_turn({"upload": uploads.service, "local loop": uploads.local}, _UPLOADS)
        planned, plan_rows = _conversations(folder / "plan.jsonl", UPLOAD_BYTES, PLAN_ROWS)
        plans = _Plans(model, folder, planned, plan_rows)
        taken |= await in_turn({"plan": plans.plan, "tokenizer": plans.tokenizer}, _PLANS)
    found = Result(
        name="upload",
        title="Upload check and plan",
        ratios=[
            Ratio("upload over the local loop, bytes a second", ratio(taken["local loop"], taken["upload"])),
            Ratio("plan over template and tokenizer alone, rows a second", ratio(taken["tokenizer"], taken["plan"])),
        ],
        rates=[
            Rate("upload", rate(size / 1e6, taken["upload"]), "MB/s"),
            Rate("upload", rate(rows, taken["upload"]), "rows/s"),
            Rate("local loop", rate(size / 1e6, taken["local loop"]), "MB/s"),
            Rate("plan", rate(plan_rows, taken["plan"]), "rows/s"),
            Rate("plan", rate(plans.tokens, taken["plan"]), "tokens/s"),
            Rate("template and tokenizer alone", rate(plan_rows, taken["tokenizer"]), "rows/s"),
        ],
        facts={
            "uploaded MB": size / 1e6,
            "uploaded rows": rows,
            "planned rows": plan_rows,
            "planned tokens": plans.tokens,
        },
        seconds=taken,
    )
    return [found]


class _Uploads:
    def __init__(self, url: str, file: Path, rows: int, copy: Path) -> None:
        self._url, self._file, self._rows, self._copy = url, file, rows, copy

    async def service(self) -> float:
        """One upload; the data set is deleted after it."""
        with Client(self._url, timeout=120) as client:
            began = time.perf_counter()
            dataset = client.upload_dataset(self._file)
            seconds = time.perf_counter() - began
            client.delete(dataset.id)
        if (dataset.rows, dataset.bad_rows) != (self._rows, 0):
            raise RuntimeError(f"{dataset.rows} rows and {dataset.bad_rows} bad ones came of {self._rows}")
        return seconds

    async def local(self) -> float:
        """The same bytes, parsed line by line, hashed, written and flushed in this process."""
        return timed(self._loop)

    def _loop(self) -> None:
        digest = hashlib.sha256()
        with self._file.open("rb") as source, self._copy.open("wb") as out:
            for line in source:
                json.loads(line)
                digest.update(line)
                out.write(line)
            out.flush()
            os.fsync(out.fileno())


class _Plans:
    def __init__(self, model: Path, storage: Path, file: Path, rows: int) -> None:
        from transformers import AutoTokenizer

        self._facts = models.facts(model)
        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._storage, self._file, self._rows = storage, file, rows
        self._made = 0
        self.tokens = 0

    async def plan(self) -> float:
        """One plan process, from its first line that says that the tokenizer is loaded to its result."""
        self._made += 1
        spec = PlanSpec(
            dataset_file=self._file.name,
            tokens_dir=f"tokens.{self._made}",
            max_tokens=None,
            overflow=Overflow.TRUNCATE,
            loss_mask=LossMask.ASSISTANT,
            shard_bytes=1 << 30,
        )
        request = PlanRequest(
            storage=self._storage, spec=spec, layers=[2, 15, 27], final=Final.POST_NORM, model=self._facts
        )
        began = None
        async for line in plan_lines(request, _QUIET_SECONDS):
            if began is None and getattr(line, "phase", "") == "planning":
                began = time.perf_counter()
            if isinstance(line, PlanResultLine):
                if line.rows != self._rows or began is None:
                    raise RuntimeError(f"the plan has {line.rows} of {self._rows} rows")
                self.tokens = line.tokens
                return time.perf_counter() - began
        raise RuntimeError("the plan process ended without a result")

    async def tokenizer(self) -> float:
        """Every row through the chat template, and all texts through the tokenizer, on all cores."""
        return timed(self._tokenise)

    def _tokenise(self) -> None:
        rows = [json.loads(line)["messages"] for line in self._file.read_bytes().splitlines()]
        texts = [self._tokenizer.apply_chat_template(messages, tokenize=False) for messages in rows]
        self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)


def _conversations(file: Path, most_bytes: int, most_rows: int | None) -> tuple[Path, int]:
    """Writes conversations until there are as many bytes or rows; the file and its rows. No two are the same."""
    samples = [json.loads(line) for line in good_lines()]
    size = rows = 0
    with file.open("w", encoding="utf-8") as out:
        while size < most_bytes and (most_rows is None or rows < most_rows):
            first, *others = samples[rows % len(samples)]["messages"]
            first = {**first, "content": f"({rows}) {first['content']}"}
            line = json.dumps({"messages": [first, *others]}, ensure_ascii=False) + "\n"
            size += len(line.encode())
            out.write(line)
            rows += 1
    return file, rows
