"""The `source` attachment point: the edited `ModelRunner.load_model` calls `after_load` at its end."""

from typing import Any

from worker.capture.attach import attach_from


def after_load(runner: Any) -> None:
    """Attaches to the model runner that has just loaded its model."""
    attach_from("source", runner)
