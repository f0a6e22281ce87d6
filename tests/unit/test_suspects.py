"""Whoever kills the engine is found, and nobody else is blamed."""

from hypothesis import given
from hypothesis import strategies as st

from worker.suspects import Suspects


@given(st.integers(1, 200), st.data())
def test_exactly_the_rows_that_kill_are_found(count: int, data: st.DataObject) -> None:
    killers = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    suspects, tries = Suspects(), 0
    suspects.accuse(range(count))
    while group := suspects.group:
        tries += 1
        assert tries < 1000
        if killers & set(group):
            suspects.convicted()
        else:
            suspects.cleared()
    assert set(suspects.guilty) == killers
    assert len(suspects.guilty) == len(killers)


def test_one_killer_costs_a_logarithm_of_tries() -> None:
    suspects, deaths = Suspects(), 0
    suspects.accuse(range(64))
    while group := suspects.group:
        if 37 in group:
            deaths += 1
            suspects.convicted()
        else:
            suspects.cleared()
    assert deaths == 7


def test_a_row_under_suspicion_is_not_accused_twice() -> None:
    suspects = Suspects()
    suspects.accuse([1, 2])
    suspects.accuse([2, 3])
    assert suspects.group == [3]
    suspects.cleared()
    assert suspects.group == [1, 2]
