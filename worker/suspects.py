"""Finding the row that kills or hangs the engine: the rows in flight are halved until one stands alone. Pure.

Every row of a group has been in flight when an engine died. Groups are tried with nothing else in flight: a group that
comes through is innocent, one that kills again is halved, and a row that kills alone is guilty.
"""

from collections.abc import Iterable


class Suspects:
    """Groups of row indices still under suspicion; the next to be tried is `group`."""

    def __init__(self) -> None:
        self._groups: list[list[int]] = []
        self.guilty: list[int] = []

    @property
    def group(self) -> list[int]:
        """The group to try next, alone; empty when nobody is under suspicion."""
        return self._groups[-1] if self._groups else []

    def accuse(self, rows: Iterable[int]) -> None:
        """These rows were in flight, and not tried alone, when the engine died."""
        known = {row for group in self._groups for row in group}
        fresh = sorted(set(rows) - known - set(self.guilty))
        if fresh:
            self._groups.append(fresh)

    def cleared(self) -> None:
        """The group under trial came through."""
        self._groups.pop()

    def convicted(self) -> int | None:
        """The engine died with nothing but the group under trial in flight. The guilty row, where that tells it."""
        group = self._groups.pop()
        if len(group) == 1:
            self.guilty.append(group[0])
            return group[0]
        middle = len(group) // 2
        self._groups += [group[middle:], group[:middle]]
        return None
