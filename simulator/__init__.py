"""Simulation: what a plan does on a machine, to the picosecond."""

from teraio.simulator.simulation import simulate

__all__ = ["simulate"]
