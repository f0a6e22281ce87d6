"""The whole way once: conversations in, verified hidden-state shards out, through the real SGLang on this CPU.

`make demo` runs it. It starts `layertap up`, speaks to it as any client would, prints the curl line of every step, and
leaves no process behind, however it ends.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

import layertap
from layertap.errors import LayertapError
from layertap.reader import Extraction
from layertap.schemas.datasets import Dataset
from layertap.schemas.jobs import Job, JobState
from worker import tied
from worker.reference import relative_error, states

HERE = Path(__file__).resolve().parent
CONVERSATIONS = HERE / "conversations.jsonl"
READY_SECONDS = 90.0
JOB_SECONDS = 600.0
STOP_SECONDS = 60.0
WORST_ALLOWED = 0.02
COMPARED_ROWS = 3


def say(text: str = "") -> None:
    """A line for whoever watches."""
    print(text, flush=True)


def step(title: str, *curl: str) -> None:
    """The heading of a step, with the curl lines that do the same."""
    say(f"\n\033[1m▸ {title}\033[0m" if sys.stdout.isatty() else f"\n▸ {title}")
    for line in curl:
        say(f"    $ curl -s {line}")


@contextmanager
def stack(model: Path, data_dir: Path) -> Iterator[str]:
    """`layertap up` with everything below `data_dir`; its address. Ended, and known to have ended, at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    argv = [str(Path(sys.executable).with_name("layertap")), "up", "--model", str(model), "--device", "cpu"]
    argv += ["--port", str(port), "--data-dir", str(data_dir)]
    log = data_dir / "up.log"
    with log.open("wb") as output:
        up = subprocess.Popen(
            tied.command(os.getpid(), argv), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_up(up, url, log)
        yield url
    finally:
        up.terminate()
        try:
            up.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(up.pid, signal.SIGKILL)
            up.wait()


def wait_until_up(up: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Returns once a worker has registered. Raises `SystemExit` with the log when that does not come."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and up.poll() is None:
        try:
            if httpx.get(f"{url}/v1/workers", timeout=5).json()["data"]:
                return
        except (httpx.TransportError, ValueError, KeyError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"layertap up did not come up:\n{log.read_text(errors='replace')[-3000:]}")


shown: list[str] = []


def show(job: Job) -> None:
    """One line of progress; on a terminal it stays on its line, elsewhere it is printed when there is news."""
    p = job.progress
    total = p.tokens_total or 0
    share = p.tokens_done / total if total else 0.0
    bar = "█" * round(30 * share) + "░" * (30 - round(30 * share))
    rate = f"{p.tokens_per_second:,.0f} tokens/s" if p.tokens_per_second else ""
    line = f"    {job.state.value:<10} {bar} {p.rows_done}/{p.rows_total or '?'} rows, {p.tokens_done:,} tokens"
    if sys.stdout.isatty():
        print(f"\r{line}  {rate:<24}", end="", flush=True)
    elif [line] != shown:
        shown[:] = [line]
        say(f"{line}  {rate}")


def upload(client: layertap.Client) -> Dataset:
    """Uploads the conversations."""
    step(
        "Upload 60 conversations, one of them bad on purpose",
        f"--data-binary @{CONVERSATIONS.relative_to(HERE.parent)} '{client.url}/v1/datasets?name=conversations'",
    )
    dataset = client.upload_dataset(CONVERSATIONS)
    say(f"    {dataset.id}: {dataset.rows} good rows, {dataset.bad_rows} bad, sha256 {dataset.sha256[:16]}…")
    return dataset


def extract(client: layertap.Client, dataset: Dataset, model: Path) -> Job:
    """Creates the job and watches it to its end."""
    body = f'{{"dataset": "{dataset.id}", "model": "{model.name}", "preset": "eagle3"}}'
    step("Ask for the hidden states that EAGLE-3 trains on", f"--json '{body}' {client.url}/v1/jobs")
    job = client.create_job(dataset=dataset.id, model=model.name, preset="eagle3")
    say(f"    {job.id}: boundaries {job.layers} and the final hidden state")
    step("Watch it (the first seconds start SGLang)", f"-N {client.url}/v1/jobs/{job.id}/events")
    job = client.wait(job.id, timeout=JOB_SECONDS, on_update=show)
    if sys.stdout.isatty():
        say()
    if job.state is not JobState.SUCCEEDED:
        raise SystemExit(f"the job ended {job.state.value}: {job.failure}")
    step("Ask which rows have no hidden states, and why", f"{client.url}/v1/jobs/{job.id}/errors")
    for problem in client.errors(job.id):
        say(f"    line {problem.line}: {problem.code}: {problem.reason}")
    return job


def download(client: layertap.Client, job: Job, folder: Path) -> Extraction:
    """Pulls the shards and verifies every checksum."""
    step(
        f"Pull into {folder.name}/, each shard checked against its sha256",
        f"-O {client.url}/v1/jobs/{job.id}/shards/0/content",
        f"-O {client.url}/v1/jobs/{job.id}/manifest",
    )
    client.pull(job.id, folder)
    reader = layertap.open(folder)
    reader.verify()
    size = sum(shard.bytes for shard in reader.manifest.shards)
    say(f"    {len(reader)} rows in {len(reader.manifest.shards)} shards, {size / 1e6:.1f} MB, every sha256 right")
    return reader


def compare(reader: Extraction, model: Path) -> float:
    """Holds three rows against Hugging Face in float32; the worst relative error."""
    step(f"Compare {COMPARED_ROWS} rows with Hugging Face in float32 (relative error, bf16 rounds at 0.4 %)")
    layers = reader.manifest.layers
    say("    row   tokens  " + "".join(f"boundary {k:<4}" for k in layers) + "final")
    worst = 0.0
    for index in np.linspace(0, len(reader) - 1, COMPARED_ROWS).astype(int).tolist():
        row = reader[index]
        right = states(model, row.input_ids.tolist(), layers)
        errors = [relative_error(row.boundary(k), right.boundaries[k]) for k in layers]
        errors.append(relative_error(row.final_hidden_state, right.final))
        worst = max(worst, *errors)
        say(f"    {row.row_id:<5} {len(row.input_ids):>6}  " + "".join(f"{100 * e:>6.2f} %     " for e in errors))
    return worst


def main() -> int:
    """The exit code is 0 if every step held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the shards (emptied first)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model, out = arguments.model.resolve(), arguments.out
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    data_dir = out.resolve() / "service"
    data_dir.mkdir(parents=True)
    step("Start the service and a worker: layertap up")
    with stack(model, data_dir) as url, layertap.Client(url) as client:
        say(f"    up at {url}")
        job = extract(client, upload(client), model)
        reader = download(client, job, out / "shards")
        worst = compare(reader, model)
        step("Stop both")
    say(f"    done in {time.monotonic() - began:.0f} s; worst relative error {100 * worst:.2f} %")
    say(f"\nLook at the shards:  .venv/bin/layertap inspect {out / 'shards'} --png {out / 'shards.png'}")
    if worst > WORST_ALLOWED:
        say(f"FAILED: {100 * worst:.2f} % is more than {100 * WORST_ALLOWED:.0f} %")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("\ninterrupted; everything is stopped")
        sys.exit(130)
    except LayertapError as error:
        sys.exit(f"FAILED: {error}\nEverything is stopped; the logs are below service/ in the folder of the shards.")
