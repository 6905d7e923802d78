"""The segment tree of slack against a plain array."""

from __future__ import annotations

import numpy as np
import pytest

from teraio.planner.slack_tree import (
    add_cyclic,
    first_below_cyclic,
    last_below_cyclic,
    slack_tree,
)


@pytest.mark.parametrize("seed", range(60))
def test_tree_agrees_with_an_array(seed: int) -> None:
    """Additions and searches over random unrolled ranges, for sizes that are no powers of two."""
    chance = np.random.default_rng(seed)
    num_kernels = int(chance.integers(1, 40))
    plain = chance.integers(-5, 20, num_kernels)
    tree = slack_tree(plain)
    for _ in range(40):
        first = int(chance.integers(0, 2 * num_kernels))
        last = first + int(chance.integers(0, num_kernels + 1))
        amount = int(chance.integers(-10, 25))
        below = [k for k in range(first, last) if plain[k % num_kernels] < amount]
        found = first_below_cyclic(tree, first, last, amount, num_kernels)
        assert found == (below[0] if below else last)
        found = last_below_cyclic(tree, first, last, amount, num_kernels)
        assert found == (below[-1] if below else first - 1)
        add_cyclic(tree, first, last, amount % 7 - 3, num_kernels)
        for kernel in range(first, last):
            plain[kernel % num_kernels] += amount % 7 - 3
