"""What must leave when memory is short, and who of all leaves first: executor and simulator alike.

First to leave is what was not fetched ahead of a use that is yet to come, of that what is not
small, of that what is used again last, of that the youngest.
"""

from __future__ import annotations

SMALL_BYTES = 4096
"""Storages below this, as allocated, free next to nothing."""

NOT_USED_AGAIN = 2**60
"""Position of the next use of a storage that dies before it; no other is as far."""
