"""Any history of leases, against the real service on SQLite and a plain model of the rules."""

import dataclasses
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fixtures_service import LEASE_SECONDS, Clock, Rig, open_rig, proof, settings_for
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from service.tasks import repository

SHARDS = 3


@dataclasses.dataclass
class Expected:
    """What the model knows of one shard."""

    state: str = "ready"
    generation: int = 0
    attempts: int = 0
    expiries: int = 0
    deadline: float = 0.0


class LeaseMachine(RuleBasedStateMachine):
    """Claims, commits, failures, releases, heartbeats and time, with leases old and new."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.clock = Clock()
        self.leases: list[dict[str, Any]] = []
        self.tasks: dict[str, Expected] = {}

    @initialize()
    def start(self) -> None:
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        options = settings_for(f"sqlite:///{folder}/layertap.sqlite3", folder, max_expiries=4)
        self.rig: Rig = self.stack.enter_context(open_rig(options, self.clock))
        self.rig.register()
        self.job = self.rig.planned(SHARDS)

    def teardown(self) -> None:
        self.stack.close()

    @rule()
    def claim(self) -> None:
        lease = self.rig.claim()["lease"]
        self._expire()
        if lease is None:
            assert not [t for t in self.tasks.values() if t.state == "ready"]
            assert len(self.tasks) == SHARDS
            return
        task = self.tasks.setdefault(lease["task"], Expected())
        assert task.state == "ready"
        task.state, task.generation = "leased", task.generation + 1
        task.deadline = self.clock.seconds + LEASE_SECONDS
        assert lease["generation"] == task.generation
        self.leases.append(lease)

    @rule(data=st.data(), verb=st.sampled_from(["heartbeat", "commit-shard", "fail", "release"]))
    def speak(self, data: st.DataObject, verb: str) -> None:
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases))
        task = self.tasks[lease["task"]]
        held = task.state == "leased" and task.generation == lease["generation"]
        repeated = verb == "commit-shard" and task.state == "done" and task.generation == lease["generation"]
        body = self.rig.write_shard(lease, b"0123456789") if verb == "commit-shard" else proof(lease)
        if verb == "fail":
            body |= {"code": "boom", "reason": "it broke"}
        answer = self.rig.client.post(f"/v1/tasks/{lease['task']}/{verb}", json=body)
        assert answer.status_code == (200 if held or repeated else 409), answer.text
        if held:
            self._apply(task, verb)

    def _apply(self, task: Expected, verb: str) -> None:
        if verb == "heartbeat":
            task.deadline = self.clock.seconds + LEASE_SECONDS
        elif verb == "commit-shard":
            task.state = "done"
        elif verb == "fail":
            task.attempts += 1
            task.state = "failed" if task.attempts == 3 else "ready"
        else:
            task.state = "ready"

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS / 2, LEASE_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.clock.seconds += seconds

    @rule()
    def upkeep(self) -> None:
        self.rig.upkeep()
        self._expire()

    def _expire(self) -> None:
        """The model's expiry: the service applies it in upkeep, and in a claim that finds nothing ready."""
        for name, task in self.tasks.items():
            over = task.state == "leased" and task.deadline <= self.clock.seconds
            if over and self._lease_of(name) != ("leased", task.generation):
                task.expiries += 1
                task.state = "failed" if task.expiries == 4 else "ready"

    def _lease_of(self, task: str) -> tuple[str, int]:
        with self.rig.context.database.read() as session:
            row = repository.get(session, task)
            assert row is not None
            return row.state, row.generation

    @invariant()
    def the_job_counts_what_is_committed(self) -> None:
        if not hasattr(self, "job"):
            return
        done = [task for task in self.tasks.values() if task.state == "done"]
        job = self.rig.state(self.job)
        assert job["progress"]["shards_done"] == len(done)
        ended = [task for task in self.tasks.values() if task.state in ("done", "failed")]
        assert (job["state"] == "running") == (len(ended) < SHARDS)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
