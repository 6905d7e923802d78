"""Constraints in which the guide differs from the bound: what a plan made from it really needs.

Numbers are those of :mod:`teraio.planner.fluid.formulation`. The bound must hold for any plan; the
guide only has to lead to a good one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from teraio.contracts.table import IntArray
from teraio.planner.fluid.channels import Tier
from teraio.planner.fluid.formulation import ProgramWriter, TierColumns

SHARE_OF_TIERS = 0.97
"""What packing slots leaves of a tier without holes, and repair without its additions, where the
choice is not made to fit the tiers afterwards (:mod:`tier_fitting`)."""

_LACK_PRICE = 100.0
"""Cost of a byte that should be away in a slot and is not, in reads of it by the fastest device."""


class GuideWriter(ProgramWriter):
    """(7) for whole tensors, and (9) for slots as plans take them, in a share of each tier."""

    def __init__(self, *arguments: Any, share_of_tiers: float = SHARE_OF_TIERS) -> None:
        super().__init__(*arguments)
        self.share_of_tiers = share_of_tiers

    def require_memory(self, columns: list[TierColumns], needed_bytes: IntArray) -> IntArray:
        """(7) Out from the start to the end of a slot: the most that any of its kernels needs."""
        needed = needed_bytes / self.byte_unit
        highest = np.full(len(self.slots), -np.inf)
        np.maximum.at(highest, self.slots.of_piece[0::2], needed)
        pressed = np.flatnonzero(highest > 0)
        at_start, at_end = (
            self.builder.constraints(len(pressed), highest[pressed], np.inf) for _ in range(2)
        )
        for c in columns:
            self.builder.add(at_start, c.out[pressed], 1.0)
            self._add_out_at_end(at_end, pressed, c)
        self.allow_lack(at_start, at_end)
        return np.concatenate((at_start, at_end))

    def allow_lack(self, at_start: IntArray, at_end: IntArray) -> None:
        """No byte that should be away may stay."""

    def _limit_capacity(self, tier: Tier, c: TierColumns) -> None:
        """(9) A slot is taken from the release of the gap that writes it to the end of the last gap
        of its version, whatever else serves in between; that of a storage never written, always.

        K is the level of slots taken: K_{s+1} = K_s + sum_{a_g = s} delta_g - sum delta_g of the
        versions that end with s.
        """
        builder, count, gaps = self.builder, len(self.slots), self.gaps
        end = self._version_ends()
        levels = builder.constraints(count, 0.0, 0.0)
        builder.add(levels, np.roll(c.kept, -1), 1.0)
        builder.add(levels, c.kept, -1.0)
        builder.add(levels[self.release], c.delta, -1.0)
        builder.add(levels[end % count], c.delta, 1.0)
        anchor = builder.constraints(1, 0.0, 0.0)
        builder.add(anchor, c.kept[:1], 1.0)
        crossings = (end // count - gaps.release // count).astype(float)
        builder.add(np.repeat(anchor, len(c.delta)), c.delta, -crossings)
        room = self.share_of_tiers * tier.capacity_bytes / self.byte_unit
        rows = builder.constraints(count, -np.inf, room)
        builder.add(rows, c.kept, 1.0)
        for copy in c.copy[gaps.previous[self.serves] >= self.serves]:
            builder.add(rows, np.repeat(copy, count), 1.0)
        self.capacity_rows[tier.name] = rows

    def _version_ends(self) -> IntArray:
        """Slot, unrolled, in which the last gap of each gap's version ends."""
        begins = self.gaps.previous != np.arange(len(self.gaps)) - 1
        begins[:1] = True
        first = np.flatnonzero(begins)
        last = np.r_[first[1:], len(self.gaps)] - 1
        result: IntArray = np.repeat(self.gaps.due[last], last - first + 1)
        return result


class LackingWriter(GuideWriter):
    """Constraint (7) at a price, for where it cannot hold."""

    def allow_lack(self, at_start: IntArray, at_end: IntArray) -> None:
        """What stays in a slot is as much at its start as at its end."""
        lacks = self.builder.variables(len(at_start), np.inf, _LACK_PRICE)
        for rows in (at_start, at_end):
            self.builder.add(rows, lacks, 1.0)
