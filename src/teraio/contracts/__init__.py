"""The nouns that every part shares: Hardware, Plan, Timeline, and how they become files."""

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Slowdown, Ssd
from teraio.contracts.plan import Copies, Moves, Plan, PlanMetadata
from teraio.contracts.timeline import Events, Timeline, TimelineMetadata

__all__ = [
    "Copies",
    "Events",
    "Gpu",
    "Hardware",
    "Host",
    "Link",
    "Moves",
    "Plan",
    "PlanMetadata",
    "Slowdown",
    "Ssd",
    "Timeline",
    "TimelineMetadata",
]
