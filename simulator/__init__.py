"""Simulation: what a plan does on a machine, to the picosecond."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teraio.simulator.simulation import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    """Import the engine, and numba with it, only for those who simulate."""
    if name in __all__:
        from teraio.simulator import simulation

        return getattr(simulation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
