"""`python -m benchmarks --model DIR`: runs every benchmark, keeps the results, writes docs/benchmarks.md anew.

Each benchmark is a process of its own with a bound on its time; whatever it leaves behind is ended. Only a run of all
of them is kept.
"""

import argparse
import asyncio
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from layertap.children import Child, adopt_orphans, children_of, end_orphans
from worker.engine import processes

RESULTS = Path(__file__).resolve().parent / "results"
MODULES = ("claims", "download", "upload", "extraction")
"""In the order they run in: the engine, whose start may take long on a busy machine, has what time is left."""
SHOWN = ("extraction", "hugging_face", "claims", "download", "upload")
TOTAL_SECONDS = 880.0
_STOP_SECONDS = 30.0


def main() -> int:
    """The exit code is 0 when every benchmark gave a result, whether or not it reached its aim."""
    arguments = _arguments()
    # Told to end, whoever started something ends it first: Postgres, which runs as another user, has no tie to us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.measure:
        found = asyncio.run(importlib.import_module(f"benchmarks.{arguments.measure}").measure(arguments.model))
        arguments.output.write_text(json.dumps([result.as_json() for result in found]))
        return 0
    if arguments.render:
        report.render(report.newest(RESULTS))
        return 0
    adopt_orphans()
    began = datetime.now(UTC)
    names = arguments.only or list(MODULES)
    run: dict[str, Any] = {"began": began.isoformat(timespec="seconds"), "machine": machine.describe()}
    deadline = time.monotonic() + TOTAL_SECONDS
    run["benchmarks"] = [result for name in names for result in _measured(name, arguments.model, deadline)]
    run["benchmarks"].sort(key=lambda result: SHOWN.index(result["name"]))
    for line in report.lines(run):
        print(line)
    if not arguments.only:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{began:%Y%m%dT%H%M%SZ}.json").write_text(json.dumps(run, indent=1) + "\n")
        report.render(run)
    return 0


def _measured(name: str, model: Path, deadline: float) -> list[dict[str, Any]]:
    """The results of one module, run in a process of its own. Raises `SystemExit` with its last words if it fails."""
    bound = min(importlib.import_module(f"benchmarks.{name}").BOUND_SECONDS, deadline - time.monotonic())
    print(f"{name}: at most {bound:.0f} s …", flush=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith("LAYERTAP_")}
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as folder:
        output = Path(folder) / "result.json"
        words = [sys.executable, "-m", "benchmarks", "--model", str(model), "--measure", name, "--output", str(output)]
        # Threads that spin while they wait for each other make every figure on a busy machine a matter of luck.
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        began, load = time.monotonic(), machine.load()
        child = Child(name, words, Path(folder) / "log", env)
        try:
            while child.exit_code is None and time.monotonic() - began < bound:
                time.sleep(0.2)
        finally:
            in_time = child.exit_code is not None
            child.stop(_STOP_SECONDS)
            left = [pid for pid in children_of(os.getpid()) if processes.alive(pid)]
            end_orphans()
        if left:
            print(f"{name} left {len(left)} processes behind; they are ended", file=sys.stderr)
        if child.exit_code != 0:
            why = (
                "failed"
                if in_time
                else f"did not end within {bound:.0f} s (is the machine busy? load {machine.load():.1f})"
            )
            raise SystemExit(f"{name} {why}:\n" + "\n".join(child.last_lines(40)))
        found: list[dict[str, Any]] = json.loads(output.read_text())
    took = round(time.monotonic() - began, 1)
    print(f"{name}: done in {took:.0f} s", flush=True)
    return [{**result, "process_seconds": took, "load_before": round(load, 2)} for result in found]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios measured in one run each.")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct, as worker.demo_model makes it")
    parser.add_argument("--only", action="append", choices=MODULES, help="measure just this, and keep nothing")
    parser.add_argument("--render", action="store_true", help="write docs/benchmarks.md from the newest result")
    parser.add_argument("--measure", choices=MODULES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is None and not arguments.render:
        parser.error("--model is needed")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
