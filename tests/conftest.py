"""Fixtures are kept by part, one file each.

Every Python process that tests start runs `faults/sitecustomize.py` first.
"""

import os
from pathlib import Path

_FIRST = str(Path(__file__).resolve().parent / "faults")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_FIRST, os.environ.get("PYTHONPATH", "")]))

pytest_plugins = [
    "fixtures_client",
    "fixtures_service_process",
    "fixtures_models",
    "fixtures_service",
    "fixtures_stack",
    "fixtures_packages",
]
