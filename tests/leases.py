"""Leases for tests that need one and no service."""

from typing import Any

from layertap.schemas.jobs import Final
from layertap.schemas.tasks import Lease, TaskKind


def shard_lease(**changes: Any) -> Lease:
    """A lease of a shard, as the service would grant it."""
    usual: dict[str, Any] = {
        "task": "task_a",
        "kind": TaskKind.SHARD,
        "job": "job_a",
        "generation": 1,
        "secret": "s",
        "lease_seconds": 30,
        "model": "m",
        "model_path": "/m",
        "layers": [1],
        "final": Final.POST_NORM,
    }
    return Lease(**usual | changes)
