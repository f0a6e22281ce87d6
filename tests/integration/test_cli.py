"""The command line against the real service, the worker's part played by the test."""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures_service_process import PlayedWorker, ServiceProcess, until
from typer.testing import CliRunner, Result

import layertap
from layertap.cli import app
from layertap.cli.progress import show_job
from layertap.client import Client

EXAMPLES = Path(__file__).parents[2] / "examples" / "conversations.jsonl"

Run = Callable[..., Result]


@pytest.fixture
def run(service_process: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `layertap ARGS` in this process; the exit code must be `code`."""
    monkeypatch.setenv("LAYERTAP_URL", service_process.url)

    def run_it(*args: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        assert result.exit_code == code, result.output
        return result

    return run_it


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(5)) + "no json\n")
    return path


@pytest.fixture
def done_job(run: Run, played_worker: PlayedWorker, rows_file: Path) -> str:
    """A succeeded job of five rows in two shards."""
    job = _json(run("submit", rows_file, "--model", "tiny", "--layers", "5,2", "--json"))["id"]
    played_worker.do_job([[3, 4], [5, 6, 7]])
    until(lambda: _json(run("status", job, "--json"))["state"] == "succeeded")
    return str(job)


def _json(result: Result) -> Any:
    return json.loads(result.stdout)


def test_the_examples_have_sixty_rows_and_exactly_one_bad_one(run: Run, played_worker: PlayedWorker) -> None:
    result = run("submit", EXAMPLES, "--model", "tiny", "--preset", "eagle3")
    assert "59 rows" in result.stderr
    assert "1 bad line without" in result.stderr
    assert "narrator" in result.stderr
    assert "boundaries [2, 4, 5] of tiny" in result.stdout


def test_submit_sends_every_setting(run: Run, played_worker: PlayedWorker, rows_file: Path) -> None:
    settings = ["--final", "none", "--max-tokens", 99, "--overflow", "skip", "--loss-mask", "all"]
    settings += ["--shard-bytes", 100_000, "--metadata", "team=a", "--metadata", "run=7=8", "--name", "mine"]
    job = _json(run("submit", rows_file, "--model", "tiny", "--layers", "0,8", *settings, "--json"))
    assert (job["layers"], job["preset"], job["final"], job["max_tokens"]) == ([0, 8], None, "none", 99)
    assert (job["overflow"], job["loss_mask"], job["shard_bytes"]) == ("skip", "all", 100_000)
    assert job["metadata"] == {"team": "a", "run": "7=8"}
    again = _json(run("submit", job["dataset"], "--model", "tiny", "--layers", "1", "--json"))
    assert again["dataset"] == job["dataset"]


def test_submit_with_watch_waits_for_the_end(
    run: Run, played_worker: PlayedWorker, rows_file: Path, background: ThreadPoolExecutor
) -> None:
    work = background.submit(played_worker.do_job, [[3, 4, 5, 6, 7]])
    result = run("submit", rows_file, "--model", "tiny", "--layers", "2", "--watch")
    work.result()
    assert "succeeded: 5 rows, 25 tokens, 1 shard" in result.stdout
    assert "5/5 rows" in result.stderr
    assert "1 row without hidden states" in result.stderr


def test_watch_exits_with_one_for_a_failed_job(run: Run, played_worker: PlayedWorker, rows_file: Path) -> None:
    job = _json(run("submit", rows_file, "--model", "tiny", "--layers", "2", "--json"))["id"]
    played_worker.fail(played_worker.claim(), "the engine fell over")
    result = run("watch", job, code=1)
    assert "failed" in result.stdout
    assert "fell over" in result.stderr
    assert "failed" in run("status").stdout


def test_a_job_that_failed_can_be_retried_to_its_end(run: Run, played_worker: PlayedWorker, rows_file: Path) -> None:
    job = _json(run("submit", rows_file, "--model", "tiny", "--layers", "2", "--json"))["id"]
    played_worker.plan(played_worker.claim(), [[3, 4], [5, 6, 7]])
    lengths = [[3, 4], [5, 6, 7]]
    first = played_worker.claim()
    played_worker.extract(first, lengths[first["shard"]["index"]])
    played_worker.fail(played_worker.claim(), "out of luck")
    run("watch", job, code=1)
    assert _json(run("retry", job, "--json"))["state"] == "running"
    lease = played_worker.claim()
    played_worker.extract(lease, lengths[lease["shard"]["index"]])
    run("watch", job)


def test_a_cancelled_job_gives_what_it_had(
    run: Run, played_worker: PlayedWorker, rows_file: Path, tmp_path: Path
) -> None:
    job = _json(run("submit", rows_file, "--model", "tiny", "--layers", "2", "--json"))["id"]
    played_worker.plan(played_worker.claim(), [[3, 4], [5, 6, 7]])
    lease = played_worker.claim()
    played_worker.extract(lease, [[3, 4], [5, 6, 7]][lease["shard"]["index"]])
    run("cancel", job)
    run("watch", job, code=1)
    result = run("pull", job, tmp_path / "out")
    assert "partial" in result.stderr
    rows = layertap.open(tmp_path / "out")
    assert not rows.complete
    assert len(rows) in (2, 3)


def test_pull_verify_and_inspect_a_job(run: Run, done_job: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "verified 5 rows, 25 tokens in 2 shards" in run("pull", done_job, out).stdout
    assert _json(run("pull", done_job, out, "--json"))["skipped_shards"] == 2
    assert "verified 2 shards" in run("verify", out).stdout
    result = run("inspect", out)
    assert "SGLang layers_to_capture" in result.stdout
    assert (out / "inspect.png").read_bytes().startswith(b"\x89PNG")
    facts = _json(run("inspect", out, "--json", "--png", tmp_path / "p.png"))
    assert facts["summary"]["tokens"] == 25
    assert facts["manifest"]["layers"] == [2, 5]
    assert (tmp_path / "p.png").stat().st_size > 10_000
    rows = layertap.open(out)
    assert [len(row.input_ids) for row in rows] == [3, 4, 5, 6, 7]


def test_verify_of_a_damaged_folder_names_the_file_and_the_remedy(run: Run, done_job: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("pull", done_job, out)
    path = next(out.glob("shard-00001*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = run("verify", out, code=2).stderr
    assert path.name in said
    assert "layertap pull" in said
    run("pull", done_job, out)
    run("verify", out)


def test_status_lists_and_details_jobs(run: Run, done_job: str) -> None:
    listed = run("status").stdout
    assert done_job in listed
    assert "5/5" in listed
    assert _json(run("status", "--state", "queued", "--json")) == []
    detail = run("status", done_job).stdout
    assert "2/2" in detail
    assert "1 error" in detail


def test_errors_lists_bad_lines_of_jobs_and_data_sets(run: Run, done_job: str) -> None:
    assert "invalid_json" in run("errors", done_job).stdout
    dataset = _json(run("status", done_job, "--json"))["dataset"]
    (problem,) = _json(run("errors", dataset, "--json"))
    assert (problem["line"], problem["row_id"], problem["stage"]) == (6, 5, "upload")


def test_models_and_workers_are_listed(run: Run, played_worker: PlayedWorker) -> None:
    assert "tiny" in run("models").stdout
    assert played_worker.id in run("workers").stdout
    assert _json(run("models", "--json"))[0]["num_layers"] == 8
    states = {worker["id"]: worker["state"] for worker in _json(run("workers", "--json"))}
    assert states[played_worker.id] == "active"


def test_what_goes_on_now_is_shown_with_the_worker_and_the_job(
    run: Run,
    played_worker: PlayedWorker,
    service_client: Client,
    rows_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = _json(run("submit", rows_file, "--model", "tiny", "--layers", "2", "--json"))["id"]
    played_worker.plan(played_worker.claim(), [[3, 4, 5, 6, 7]])
    lease = played_worker.claim()
    played_worker.report(lease, tokens_per_second=1234.0, plain_tokens_per_second=2000.0, writer_wait=0.07)
    shown = run("workers").stdout
    for word in ("1,234", "62 %", "7 %"):
        assert word in shown
    for word in ("1,234 tokens/s", "62 % of plain prefill", "waits 7 %", "pool – full"):
        assert word in run("status", job).stdout
    show_job([service_client.job(job)])
    said = capsys.readouterr().err
    assert re.search(r"1,234 tokens/s  \d+ kB/s  62 % of plain prefill  \d+ tokens/s on the mean", said), said


def test_rm_deletes_a_job_and_its_data_set(run: Run, done_job: str) -> None:
    dataset = _json(run("status", done_job, "--json"))["dataset"]
    run("rm", done_job, dataset)
    assert "no job" in run("status", done_job, code=2).stderr


def test_pulling_a_job_that_goes_on_is_a_problem_with_its_remedy(
    run: Run, played_worker: PlayedWorker, rows_file: Path, tmp_path: Path
) -> None:
    job = _json(run("submit", rows_file, "--model", "tiny", "--layers", "2", "--json"))["id"]
    said = run("pull", job, tmp_path / "out", code=2).stderr
    assert "not over" in said
    assert "wait" in said


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--model", "tiny", "--layers", "9"], ["layers", "0 to 8"]),
        (["--model", "tiny", "--layers", "2,2"], ["layers", "more than once"]),
        (["--model", "absent", "--layers", "2"], ["model", "absent"]),
        (["--model", "tiny", "--layers", "2", "--shard-bytes", "1"], ["shard_bytes"]),
        (["--model", "tiny", "--layers", "two"], ["3,31,59"]),
        (["--model", "tiny"], ["--preset"]),
        (["--model", "tiny", "--layers", "2", "--metadata", "x"], ["KEY=VALUE"]),
    ],
)
def test_bad_requests_name_the_field_and_the_remedy_without_a_traceback(
    run: Run, played_worker: PlayedWorker, rows_file: Path, args: list[str], told: list[str]
) -> None:
    said = run("submit", rows_file, *args, code=2).stderr
    assert "error:" in said
    for word in told:
        assert word in said
    assert "Traceback" not in said


def test_a_file_that_is_not_there_is_said_before_anything_is_sent(run: Run, tmp_path: Path) -> None:
    said = run("submit", tmp_path / "absent.jsonl", "--model", "tiny", "--layers", "2", code=2).stderr
    assert "is no file" in said


def test_ids_that_are_none_are_refused_here(run: Run) -> None:
    assert "is no id" in run("status", "../../x", code=2).stderr


def test_no_service_is_a_clear_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--url", "http://127.0.0.1:1", "status"])
    assert result.exit_code == 2
    assert "layertap up" in result.stderr


def test_a_service_that_restarts_is_followed_to_the_end(
    service_process: ServiceProcess, service_client: Client, played_worker: PlayedWorker, rows_file: Path
) -> None:
    job = service_client.create_job(service_client.upload_dataset(rows_file).id, "tiny", [2])
    played_worker.plan(played_worker.claim(), [[3, 4, 5, 6, 7]])
    states: list[str] = []
    ended: list[str] = []

    def wait() -> None:
        ended.append(service_client.wait(job.id, 60, lambda j: states.append(j.state)).state)

    watcher = threading.Thread(target=wait)
    watcher.start()
    until(lambda: "running" in states)
    assert service_process.child is not None
    os.kill(service_process.child.pid, 9)
    service_process.child.stop(5)
    service_process.start()
    played_worker.extract(played_worker.claim(), [3, 4, 5, 6, 7])
    watcher.join(60)
    assert ended == ["succeeded"]


def test_client_lists_go_over_several_pages(
    service_client: Client, played_worker: PlayedWorker, rows_file: Path
) -> None:
    dataset = service_client.upload_dataset(rows_file).id
    made = [service_client.create_job(dataset, "tiny", [2]).id for _ in range(5)]
    assert [job.id for job in service_client.jobs(page_size=2)] == made[::-1]
    assert [item.id for item in service_client.datasets()] == [dataset]


def test_the_same_idempotency_key_makes_one_job(
    service_client: Client, played_worker: PlayedWorker, rows_file: Path
) -> None:
    dataset = service_client.upload_dataset(rows_file).id
    jobs = {service_client.create_job(dataset, "tiny", [2], idempotency_key="one").id for _ in range(3)}
    assert len(jobs) == 1
    assert [job.id for job in service_client.jobs()] == list(jobs)
