"""Fixtures are kept by part, one file each.

Every Python process that tests start runs `faults/sitecustomize.py` first. Each computes with one thread: several at a
time on few cores would mostly wait for their threads, and spin meanwhile.
"""

import os
from pathlib import Path

_FIRST = str(Path(__file__).resolve().parent / "faults")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_FIRST, os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = [
    "fixtures_client",
    "fixtures_service_process",
    "fixtures_models",
    "fixtures_service",
    "fixtures_stack",
    "fixtures_packages",
]
