"""How the bytes of one device are spread over its files: in turn, one stripe unit at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Bytes ``begin`` .. ``end`` of a transfer, which lie at ``member_offset`` of one file."""

    member: int
    member_offset: int
    begin: int
    end: int


@dataclass(frozen=True)
class Stripes:
    """``num_members`` files that take turns every ``unit_bytes`` of the device.

    ``unit_bytes`` is a multiple of the device's alignment, and also the most that one piece has.
    """

    num_members: int
    unit_bytes: int

    def pieces(self, offset_bytes: int, begin: int, end: int) -> list[Piece]:
        """Bytes ``begin`` .. ``end`` of a transfer whose byte 0 is the device's ``offset_bytes``.

        In order; each lies in one file and is at most one unit.
        """
        pieces: list[Piece] = []
        while begin < end:
            at = offset_bytes + begin
            unit, inside = divmod(at, self.unit_bytes)
            if self.num_members == 1:
                # Nothing says where a unit begins: whole units from the transfer's own first byte.
                member, member_offset, room = 0, at, self.unit_bytes
            else:
                turn, member = divmod(unit, self.num_members)
                member_offset = turn * self.unit_bytes + inside
                room = self.unit_bytes - inside
            stop = min(begin + room, end)
            pieces.append(Piece(member, member_offset, begin, stop))
            begin = stop
        return pieces

    def member_bytes(self, total_bytes: int, member: int) -> int:
        """How much of the device's first ``total_bytes`` lies in one file."""
        units, rest = divmod(total_bytes, self.unit_bytes)
        turns, extra = divmod(units, self.num_members)
        return (turns + (member < extra)) * self.unit_bytes + (rest if member == extra else 0)
