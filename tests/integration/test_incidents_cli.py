"""Incidents from a worker's report to what a person reads, over the real service as a process."""

import asyncio
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fixtures_service_process import PlayedWorker, ServiceProcess
from typer.testing import CliRunner

from layertap.cli import app
from layertap.client import Client
from layertap.errors import NotFoundError
from layertap.schemas.incidents import Blame, Evidence, Incident, IncidentKind, IncidentReport, ProcessEvidence
from worker.service_api import ServiceApi, ServiceError

STACK = 'Thread 7 (active): "MainThread"\n    forward [layer] (model_runner.py:2410)\n'


def report(worker: str, number: int, **more: Any) -> IncidentReport:
    facts: dict[str, Any] = {
        "id": f"inc_{worker[4:12]}{number}",
        "worker": worker,
        "model": "tiny",
        "kind": IncidentKind.HUNG_SERVING,
        "phase": "serving",
        "reason": "4096 tokens in flight, none captured for 301 s",
        "happened_at": datetime(2026, 11, 30, 2, 15, 42, tzinfo=UTC),
    }
    return IncidentReport.model_validate(facts | more)


def full_report(worker: str, number: int, **more: Any) -> IncidentReport:
    """A report that has something under every heading."""
    process = ProcessEvidence(
        pid=4711,
        command="sglang::scheduler [TP0]",
        state="R (running)",
        threads=41,
        rss_bytes=2_000_000_000,
        cpu_seconds=412.5,
        wait_channel="futex_wait",
        stack=STACK,
    )
    evidence = Evidence(
        log_tail="Prefill batch. [bold]\n\x1b[2J\x1b]0;title\x07the last line\n",
        processes=[process],
        gpu=["0: NVIDIA H200, 81 GiB"],
        signals={"tokens_captured": "81920, last moved 301 s ago"},
        engine={"version": "0.5.23"},
    )
    tried = ["started unpatched: healthy", "started by plugin: healthy"]
    found = {"blame": Blame.PATCH, "tried": tried, "processes_left": 0, "gpu_bytes_left": 1_500_000}
    return report(worker, number, evidence=evidence, **found, **more)


def send(service: ServiceProcess, *reports: IncidentReport) -> list[Incident]:
    """What the worker does with its reports."""

    async def each() -> list[Incident]:
        api = ServiceApi(service.url, None)
        try:
            return [await api.report_incident(one, 20) for one in reports]
        finally:
            await api.aclose()

    return asyncio.run(each())


def run(service: ServiceProcess, *args: str, code: int = 0) -> str:
    """What `layertap ARGS` prints."""
    result = CliRunner().invoke(app, ["--url", service.url, *args])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def lease(played_worker: PlayedWorker, service_client: Client, tmp_path: Path) -> dict[str, Any]:
    """A task that the worker holds."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n')
    service_client.create_job(service_client.upload_dataset(path).id, "tiny", [2])
    return played_worker.claim()


def test_a_worker_reports_an_incident_and_adds_what_it_found(
    service_process: ServiceProcess, service_client: Client, played_worker: PlayedWorker, lease: dict[str, Any]
) -> None:
    first = report(played_worker.id, 1, tasks=[lease["task"]])
    later = first.model_copy(update={"blame": Blame.ROW, "tried": ["half of the rows: healthy"]})
    answers = send(service_process, first, later, later)
    assert [answer.blame for answer in answers] == [Blame.UNKNOWN, Blame.ROW, Blame.ROW]
    (listed,) = service_client.incidents(job=lease["job"])
    assert listed == answers[-1] == service_client.incident(first.id)
    assert (listed.jobs, listed.tried) == ([lease["job"]], ["half of the rows: healthy"])


def test_a_report_that_is_refused_says_why(service_process: ServiceProcess) -> None:
    with pytest.raises(ServiceError, match="worker_not_found"):
        send(service_process, report("wrk_unknown00", 1))


def test_the_client_lists_over_several_pages(
    service_process: ServiceProcess, service_client: Client, played_worker: PlayedWorker
) -> None:
    reports = [full_report(played_worker.id, number) for number in range(5)]
    send(service_process, *reports)
    found = list(service_client.incidents(worker=played_worker.id, page_size=2))
    assert [incident.id for incident in found] == [one.id for one in reversed(reports)]
    assert all(incident.evidence == Evidence() for incident in found)
    assert service_client.incident(reports[0].id).evidence == reports[0].evidence
    assert list(service_client.incidents("job_none")) == []
    with pytest.raises(NotFoundError):
        service_client.incident("inc_none0000")


def test_the_table_shows_what_whom_and_how_often(
    service_process: ServiceProcess, played_worker: PlayedWorker, lease: dict[str, Any]
) -> None:
    one, other = full_report(played_worker.id, 1, tasks=[lease["task"]]), report(played_worker.id, 2)
    send(service_process, one, other)
    table = run(service_process, "incidents", "--worker", played_worker.id)
    assert re.search(rf"{other.id} +hung_serving +unknown +{played_worker.id} +–", table)
    assert re.search(rf"{one.id} +hung_serving +patch +{played_worker.id} +{lease['job']}", table)
    assert other.id not in run(service_process, "incidents", "--job", lease["job"])
    assert run(service_process, "incidents", "--limit", "1", "--worker", played_worker.id).count("inc_") == 1
    as_json = json.loads(run(service_process, "incidents", "--job", lease["job"], "--json"))
    assert [item["id"] for item in as_json] == [one.id]
    assert "no incidents" in run(service_process, "incidents", "--job", "job_none")


def test_one_incident_reads_from_what_hung_to_the_log(
    service_process: ServiceProcess, played_worker: PlayedWorker, lease: dict[str, Any]
) -> None:
    one = full_report(played_worker.id, 1, tasks=[lease["task"]])
    send(service_process, one)
    page = run(service_process, "incidents", one.id)
    told = [
        one.id,
        "hung_serving (serving): 4096 tokens in flight",
        f"tiny on {played_worker.id}",
        lease["job"],
        "2026-11-30 02:15:42 UTC",
        "signals",
        "tokens_captured: 81920, last moved 301 s ago",
        "NVIDIA H200",
        "version: 0.5.23",
        "\nblame\n",
        "patch",
        "what was tried",
        "started unpatched: healthy",
        "started by plugin: healthy",
        "processes: 0, GPU memory: 1.5 MB",
        "stacks",
        "4711 sglang::scheduler [TP0]",
        "R (running), 41 threads, 2.0 GB of memory, 412 s of CPU, waits in futex_wait",
        "    forward [layer] (model_runner.py:2410)",
        "last lines of the log",
        "Prefill batch. [bold]\nthe last line\n",
    ]
    places = [page.find(word) for word in told]
    assert -1 not in places, dict(zip(told, places, strict=True))
    assert places == sorted(places)
    assert "\x1b]" not in page
    assert "\x1b[2J" not in page
    assert json.loads(run(service_process, "incidents", one.id, "--json"))["evidence"]["processes"][0]["stack"] == STACK


def test_an_incident_of_which_little_is_known_is_shown_too(
    service_process: ServiceProcess, played_worker: PlayedWorker
) -> None:
    one = report(played_worker.id, 1)
    send(service_process, one)
    page = run(service_process, "incidents", one.id)
    assert "GPU memory: unknown" in page
    assert page.rstrip().endswith("last lines of the log\n–")


def test_what_can_not_be_shown_is_an_error_with_its_remedy(service_process: ServiceProcess) -> None:
    assert "there is no incident 'inc_none0000'" in run(service_process, "incidents", "inc_none0000", code=2)
    assert "leave them out" in run(service_process, "incidents", "inc_none0000", "--job", "job_x", code=2)
    assert "is no id" in run(service_process, "incidents", "../x", code=2)


def test_the_status_of_a_job_mentions_its_incidents(
    service_process: ServiceProcess, played_worker: PlayedWorker, lease: dict[str, Any]
) -> None:
    job = lease["job"]
    assert "incident" not in run(service_process, "status", job)
    send(service_process, *(report(played_worker.id, number, tasks=[lease["task"]]) for number in (1, 2)))
    said = run(service_process, "status", job)
    assert "2 incidents, the latest" in said
    assert f"layertap incidents --job {job}" in said
    assert "incidents" not in json.loads(run(service_process, "status", job, "--json"))
