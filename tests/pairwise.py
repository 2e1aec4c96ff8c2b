"""Cases in which every two levels of every two factors meet."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """A short list of cases, each with a level of every factor; the same for the same seed.

    Greedy: of some random cases around a pair that is missing, the one that adds most pairs.
    """
    rng = random.Random(seed)
    missing = all_pairs(factors)
    cases = []
    while missing:
        best: dict[str, Any] = {}
        for wanted in rng.sample(sorted(missing, key=repr), min(20, len(missing))):
            case = {name: rng.randrange(len(levels)) for name, levels in factors.items()}
            case.update(wanted)
            if len(_pairs(case) & missing) > len(_pairs(best) & missing):
                best = case
        missing -= _pairs(best)
        cases.append({name: factors[name][level] for name, level in best.items()})
    return cases


def drawn(factors: Mapping[str, Sequence[Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """So many different cases of all that there are; the same for the same seed."""
    product = list(itertools.product(*factors.values()))
    chosen = random.Random(seed).sample(product, count)
    return [dict(zip(factors, levels, strict=True)) for levels in chosen]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[tuple[tuple[str, int], ...]]:
    numbered = [[(name, i) for i in range(len(levels))] for name, levels in factors.items()]
    return {
        pair
        for one, other in itertools.combinations(numbered, 2)
        for pair in itertools.product(one, other)
    }


def _pairs(case: Mapping[str, int]) -> set[tuple[tuple[str, int], ...]]:
    return set(itertools.combinations(case.items(), 2))
