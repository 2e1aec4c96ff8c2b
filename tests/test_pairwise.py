"""Cases in which every two levels of every two factors meet."""

import itertools

from tests.pairwise import pairwise


def test_every_pair_is_there_and_the_list_is_short():
    factors = {"a": (1, 2, 3), "b": "xyz", "c": (None, True), "d": (4, 5, 6, 7)}
    cases = pairwise(factors)
    for one, other in itertools.combinations(factors, 2):
        for pair in itertools.product(factors[one], factors[other]):
            assert any((case[one], case[other]) == pair for case in cases)
    assert len(cases) <= 16 < 3 * 3 * 2 * 4
    assert cases == pairwise(factors)
