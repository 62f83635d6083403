"""The case that rdiag was started for, by construction: two draft vocabularies that share most tokens and few rows.

Walk through the target vocabulary in order and give each token to both, to A alone, to B alone or to nobody. A shared
token has the same row in both exactly when as many tokens went to A alone as to B alone before it. So: 50 shared
tokens, then A stays ahead for a long stretch, then 202 shared tokens while it is even, then B stays ahead to the end.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

VOCAB = 163_840
ROWS = 32_000
PREFIX = 50
MATCHES = 252
SHARED = 25_750
WITHOUT_SOURCE = 6_250
_LEAD = 40


def _stretch(ahead: str, behind: str, alone: int, shared: int, choose: random.Random) -> str:
    """Return a stretch in which ``ahead`` leads at every shared token and both end even."""
    middle = [ahead + behind] * (alone - _LEAD) + ["s"] * shared
    choose.shuffle(middle)
    return ahead * _LEAD + "".join(middle) + behind * _LEAD


def mappings(seed: int = 252) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (ids of A, ids of B), both ascending; the same for the same seed."""
    choose = random.Random(seed)  # noqa: S311 - reproducible, not secret
    half = (SHARED - MATCHES) // 2
    walk = (
        "s" * PREFIX
        + _stretch("a", "b", WITHOUT_SOURCE // 2, half, choose)
        + "s" * (MATCHES - PREFIX)
        + _stretch("b", "a", WITHOUT_SOURCE - WITHOUT_SOURCE // 2, SHARED - MATCHES - half, choose)
    )
    tokens = list(range(PREFIX)) + sorted(choose.sample(range(PREFIX, VOCAB), len(walk) - PREFIX))
    ids = np.array(tokens, np.int64)
    kinds = np.array(list(walk))
    return ids[kinds != "b"], ids[kinds != "a"]
