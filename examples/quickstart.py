"""From a JSONL file to a folder of verified hidden states, in one go.

    python examples/quickstart.py MODEL [OUT]

MODEL is a name that `layertap models` shows; the service is LAYERTAP_URL, by default the one `layertap up` started.
"""

import sys
from pathlib import Path

import layertap

ROWS = Path(__file__).with_name("conversations.jsonl")


def main(model: str, out: str = "out") -> None:
    with layertap.Client() as client:
        dataset = client.upload_dataset(ROWS)
        print(f"{dataset.id}: {dataset.rows} rows, {dataset.bad_rows} bad")

        job = client.create_job(dataset.id, model, preset="eagle3")
        job = client.wait(job.id, on_update=lambda j: print(f"{j.state}: {j.progress.tokens_done} tokens"))
        for problem in client.errors(job.id):
            print(f"line {problem.line}: {problem.reason}")

        report = client.pull(job.id, out)
        print(f"{report.rows} rows, {report.bytes:,} bytes in {report.directory}")


if __name__ == "__main__":
    main(*sys.argv[1:])
