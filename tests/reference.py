"""The float32 reference, for tests."""

from worker.reference import Reference, boundaries, final_hidden_state, relative_error, states

__all__ = ["Reference", "boundaries", "final_hidden_state", "relative_error", "states"]
