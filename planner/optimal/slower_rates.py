"""A machine of which only a share of the rates is counted on (DESIGN: ``--bandwidth-share``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from teraio.contracts.hardware import Hardware, Host, Link, Ssd

_RATES = ("read_rate", "write_rate", "duplex_read_rate", "duplex_write_rate")

Part = TypeVar("Part", Host, Ssd, Link)


def with_rates(hardware: Hardware, share: float) -> Hardware:
    """The same machine with ``share`` of all its rates, and of what its SSDs may be written a
    second: an iteration at full rates, which is shorter, then keeps to that too.
    """
    if share == 1:
        return hardware

    def slower(part: Part) -> Part:
        rates: dict[str, Any] = {name: share * getattr(part, name) for name in _RATES}
        return replace(part, **rates)

    def slower_ssd(ssd: Ssd) -> Ssd:
        budget = ssd.write_budget
        return replace(slower(ssd), write_budget=None if budget is None else share * budget)

    memory_rate = hardware.host.memory_rate
    memory_rate = None if memory_rate is None else share * memory_rate
    return replace(
        hardware,
        link=tuple(slower(link) for link in hardware.link),
        host=replace(slower(hardware.host), memory_rate=memory_rate),
        ssd=tuple(slower_ssd(ssd) for ssd in hardware.ssd),
    )
