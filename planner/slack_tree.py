"""Slack per kernel in a segment tree: add over a range, find the kernel that stops a growth.

Slack is capacity minus resident bytes. ``tree`` is int64 (2, 2 n): minima, and amounts added to
whole subtrees, n a power of two. All ranges are half-open; those of ``*_cyclic`` are unrolled.
"""

from __future__ import annotations

import numba
import numpy as np

from teraio.contracts.table import IntArray


def slack_tree(slack_bytes: IntArray) -> IntArray:
    """A tree over ``slack_bytes``, int64 (K,)."""
    size = 1 << max(1, (len(slack_bytes) - 1).bit_length())
    tree = np.zeros((2, 2 * size), dtype=np.int64)
    # Half of the range, so that sums of huge sizes cannot overflow.
    tree[0, :] = np.iinfo(np.int64).max // 2
    tree[0, size : size + len(slack_bytes)] = slack_bytes
    level = size
    while level > 1:
        pairs = tree[0, level : 2 * level].reshape(-1, 2)
        level //= 2
        tree[0, level : 2 * level] = pairs.min(axis=1)
    return tree


@numba.njit(cache=True)
def add(tree: IntArray, first: int, last: int, amount: int) -> None:
    """Add to every kernel in [first, last)."""
    if first >= last:
        return
    size = tree.shape[1] // 2
    left, right = first + size, last + size
    while left < right:
        if left & 1:
            _apply(tree, left, amount)
            left += 1
        if right & 1:
            right -= 1
            _apply(tree, right, amount)
        left >>= 1
        right >>= 1
    _repair(tree, first + size)
    _repair(tree, last - 1 + size)


@numba.njit(cache=True)
def _apply(tree: IntArray, node: int, amount: int) -> None:
    tree[0, node] += amount
    tree[1, node] += amount


@numba.njit(cache=True)
def _repair(tree: IntArray, node: int) -> None:
    while node > 1:
        node >>= 1
        tree[0, node] = min(tree[0, 2 * node], tree[0, 2 * node + 1]) + tree[1, node]


@numba.njit(cache=True)
def _added_above(tree: IntArray, node: int) -> int:
    total = 0
    while node > 1:
        node >>= 1
        total += tree[1, node]
    return total


@numba.njit(cache=True)
def first_below(tree: IntArray, first: int, last: int, amount: int) -> int:
    """First kernel in [first, last) with less slack than ``amount``; ``last`` if there is none."""
    size = tree.shape[1] // 2
    kernel = first
    while kernel < last:
        node, width = kernel + size, 1
        while node & 1 == 0 and kernel + 2 * width <= last:
            node >>= 1
            width *= 2
        above = _added_above(tree, node)
        if tree[0, node] + above >= amount:
            kernel += width
            continue
        while node < size:
            above += tree[1, node]
            node *= 2
            if tree[0, node] + above >= amount:
                node += 1
        return int(node - size)
    return last


@numba.njit(cache=True)
def last_below(tree: IntArray, first: int, last: int, amount: int) -> int:
    """Last kernel in [first, last) with less slack than ``amount``; first - 1 if there is none."""
    size = tree.shape[1] // 2
    kernel = last - 1
    while kernel >= first:
        node, width = kernel + size, 1
        while node & 1 == 1 and kernel - 2 * width + 1 >= first:
            node >>= 1
            width *= 2
        above = _added_above(tree, node)
        if tree[0, node] + above >= amount:
            kernel -= width
            continue
        while node < size:
            above += tree[1, node]
            node = 2 * node + 1
            if tree[0, node] + above >= amount:
                node -= 1
        return int(node - size)
    return first - 1


@numba.njit(cache=True)
def add_cyclic(tree: IntArray, first: int, last: int, amount: int, num_kernels: int) -> None:
    """Like :func:`add` for an unrolled range of at most one cycle."""
    shift = first // num_kernels * num_kernels
    first, last = first - shift, last - shift
    add(tree, first, min(last, num_kernels), amount)
    add(tree, 0, last - num_kernels, amount)


@numba.njit(cache=True)
def first_below_cyclic(tree: IntArray, first: int, last: int, amount: int, num_kernels: int) -> int:
    """Like :func:`first_below` for an unrolled range of at most one cycle."""
    while first < last:
        shift = first // num_kernels * num_kernels
        end = min(last, shift + num_kernels)
        found = first_below(tree, first - shift, end - shift, amount) + shift
        if found < end:
            return found
        first = end
    return last


@numba.njit(cache=True)
def last_below_cyclic(tree: IntArray, first: int, last: int, amount: int, num_kernels: int) -> int:
    """Like :func:`last_below` for an unrolled range of at most one cycle."""
    while first < last:
        shift = (last - 1) // num_kernels * num_kernels
        begin = max(first, shift)
        found = last_below(tree, begin - shift, last - shift, amount) + shift
        if found >= begin:
            return found
        last = begin
    return first - 1
