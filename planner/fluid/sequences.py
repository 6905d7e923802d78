"""Runs of rows in a table, and intervals of a cycle."""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import FloatArray, IntArray


def ranges(first: IntArray, count: IntArray) -> IntArray:
    """first, first + 1, ... of each, ``count`` long, one after the other."""
    start = np.cumsum(count) - count
    result: IntArray = np.repeat(first - start, count) + np.arange(int(count.sum()))
    return result


def labels_of_runs(first: IntArray, count: IntArray, code: IntArray, own: IntArray) -> IntArray:
    """Equal for equal runs; 0, 1, ... in the order in which they appear.

    Run i is code[first[i]], ..., code[first[i] + count[i] - 1] and own[i]; no number is negative,
    and codes and ``own`` times the number of runs fit in 63 bits.
    """
    label = np.zeros(len(first), dtype=np.int64)
    span, used = int(code.max(initial=0)) + 1, 0
    for size in np.unique(count).tolist():
        who = np.flatnonzero(count == size)
        found = own[who]
        for place in range(size):
            found = dense(found * span + code[first[who] + place])
        found = dense(found)
        label[who] = used + found
        used += int(found.max()) + 1
    _, appears, label = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(appears), dtype=np.int64)
    rank[np.argsort(appears)] = np.arange(len(appears))
    result: IntArray = rank[label.reshape(-1)]
    return result


def dense(values: IntArray) -> IntArray:
    """The rank of each value among those that there are, so that products stay small."""
    if not len(values):
        return values
    result: IntArray = np.unique(values, return_inverse=True)[1].reshape(-1)
    return result


def cyclic_totals(first: IntArray, last: IntArray, weight: FloatArray, length: int) -> FloatArray:
    """Sum of the weights of the unrolled intervals (first, last] at each place, float64 (length,);
    rounded up, for use as a limit.
    """
    laps, rest = np.divmod(last - first, length)
    delta = np.zeros(2 * length + 1)
    start = (first + 1) % length
    np.add.at(delta, start, weight)
    np.add.at(delta, start + rest, -weight)
    running = np.cumsum(delta[:-1]).reshape(2, length).sum(axis=0)
    # What cancels in the running sum must not lower a limit.
    result: FloatArray = (running + float(np.sum(laps * weight))) * (1 + 1e-9) + 1e-9
    return result
