"""Rule 1 of ``plan_checks``: the tables that a plan carries of its trace describe a cycle."""

from __future__ import annotations

import numpy as np

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING, BoolArray
from teraio.contracts.violations import Findings

MAX_BYTES = 2**62
"""Sizes and offsets stay below it, so that no sum of two overflows 64 bits."""

_RULE = "tables"


def check_tables(plan: Plan, findings: Findings) -> bool:
    """Rule 1. False if anything is wrong: no other rule can be judged then."""
    before = dict(findings.counts)
    _check_kernels(plan, findings)
    _check_storages(plan, findings)
    if findings.counts == before:
        _check_accesses(plan, findings)
    return findings.counts == before


def _check_kernels(plan: Plan, findings: Findings) -> None:
    kernels = plan.kernels
    if len(kernels) == 0:
        findings.add("kernels", None, _RULE, "a plan needs at least one kernel")
    findings.refuse(
        kernels.kernel != np.arange(len(kernels)),
        "kernels",
        _RULE,
        lambda row: f"kernel: must run 0, 1, 2, ..., got {kernels.kernel[row]}",
    )
    findings.refuse(
        (kernels.workspace_bytes < 0) | (kernels.workspace_bytes >= MAX_BYTES),
        "kernels",
        _RULE,
        lambda row: f"workspace_bytes: out of range, got {kernels.workspace_bytes[row]}",
    )


def _check_storages(plan: Plan, findings: Findings) -> None:
    storages, num_kernels = plan.storages, len(plan.kernels)

    def refuse(bad: BoolArray, name: str, must: str) -> None:
        values = getattr(storages, name)
        findings.refuse(bad, "storages", _RULE, lambda row: f"{name}: {must}, got {values[row]}")

    refuse(storages.storage != np.arange(len(storages)), "storage", "must run 0, 1, 2, ...")
    refuse(storages.nbytes < 0, "nbytes", "must not be negative")
    too_small = storages.allocated_bytes < storages.nbytes
    refuse(too_small, "allocated_bytes", "must be at least nbytes")
    birth, death = storages.birth, storages.death
    refuse((birth < MISSING) | (birth >= num_kernels), "birth", "must be null or a kernel")
    refuse((death < MISSING) | (death >= num_kernels), "death", "must be null or a kernel")
    refuse((birth < 0) != (death < 0), "death", "birth and death must both be null, or neither")
    total = storages.allocated_bytes.sum(dtype=float) + plan.kernels.workspace_bytes.max(initial=0)
    if total >= MAX_BYTES:
        findings.add("storages", None, _RULE, f"allocated_bytes: sum up to {total:.3g} bytes")


def _check_accesses(plan: Plan, findings: Findings) -> None:
    accesses, storages, num_kernels = plan.accesses, plan.storages, len(plan.kernels)

    def refuse(bad: BoolArray, must: str) -> BoolArray:
        return findings.refuse(
            bad,
            "accesses",
            _RULE,
            lambda row: (
                f"{must}, got kernel {accesses.kernel[row]}, storage {accesses.storage[row]}"
            ),
        )

    bad_kernel = (accesses.kernel < 0) | (accesses.kernel >= num_kernels)
    bad_storage = (accesses.storage < 0) | (accesses.storage >= len(storages))
    known = refuse(bad_kernel, f"kernel: must be in 0..{num_kernels - 1}")
    known &= refuse(bad_storage, "storage: no such storage")
    if not known.all():
        return
    backwards = np.zeros(len(accesses), dtype=bool)
    backwards[1:] = np.diff(accesses.kernel) < 0
    refuse(backwards, "kernel: rows must be ordered by kernel")
    pair = accesses.kernel * max(1, len(storages)) + accesses.storage
    repeats = np.ones(len(accesses), dtype=bool)
    repeats[np.unique(pair, return_index=True)[1]] = False
    refuse(repeats, "storage: a kernel and a storage may meet in one row only")
    birth, death = storages.birth[accesses.storage], storages.death[accesses.storage]
    age, life = (accesses.kernel - birth) % num_kernels, (death - birth) % num_kernels
    refuse((birth >= 0) & (age > life), "kernel: outside the storage's lifetime")
