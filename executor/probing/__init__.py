"""Measuring this machine: rates of every tier, slowdowns, capacities, as Hardware."""

from teraio.executor.probing.limits import usable_memory_bytes
from teraio.executor.probing.machine import measure_machine, probe
from teraio.executor.probing.measurements import Measurements

__all__ = ["Measurements", "measure_machine", "probe", "usable_memory_bytes"]
