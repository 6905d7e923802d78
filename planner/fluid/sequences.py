"""Runs of rows in a table, and intervals of a cycle."""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import FloatArray, IntArray


def ranges(first: IntArray, count: IntArray) -> IntArray:
    """first, first + 1, ... of each, ``count`` long, one after the other."""
    start = np.cumsum(count) - count
    result: IntArray = np.repeat(first - start, count) + np.arange(int(count.sum()))
    return result


def labels_of_runs(first: IntArray, count: IntArray, table: IntArray, own: IntArray) -> IntArray:
    """Equal for equal runs; 0, 1, ... in the order in which they appear.

    Run i is the rows first[i], ..., first[i] + count[i] - 1 of ``table`` (rows, columns), and what
    it has of its ``own`` (runs, columns).
    """
    label = np.zeros(len(first), dtype=np.int64)
    used = 0
    for size in np.unique(count).tolist():
        who = np.flatnonzero(count == size)
        rows = first[who, np.newaxis] + np.arange(size)
        keys = np.concatenate((table[rows].reshape(len(who), -1), own[who]), axis=1)
        found, inverse = np.unique(keys, axis=0, return_inverse=True)
        label[who] = used + inverse.reshape(-1)
        used += len(found)
    _, appears, label = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(appears), dtype=np.int64)
    rank[np.argsort(appears)] = np.arange(len(appears))
    result: IntArray = rank[label.reshape(-1)]
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
