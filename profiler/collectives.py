"""Which process group a communication kernel belongs to: what pairs it up across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from teraio.profiler.operators import Operator
from teraio.profiler.segments import Collective

_PEER_ARGUMENTS = ("dst", "src", "dst_rank", "src_rank")
_PEER_TO_PEER = {"send", "recv_", "recv_any_source_"}


def describe_collective(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Collective | None:
    """Group and peer of a call; None for operators that name no group (waits)."""
    values = {**dict(zip(operator.positions, args, strict=False)), **kwargs}
    group = _group_name(values)
    if group is None:
        return None
    base = operator.name.split(".")[1]
    peer = next((values[name] for name in _PEER_ARGUMENTS if name in values), None)
    if base not in _PEER_TO_PEER:
        return Collective(group, False, None)
    return Collective(group, True, None if peer is None else int(peer))


def _group_name(values: Mapping[str, Any]) -> str | None:
    name = values.get("group_name")
    if isinstance(name, str):
        return name
    handle = values.get("process_group")
    if handle is None:
        return None
    from torch.distributed import ProcessGroup

    group = handle if isinstance(handle, ProcessGroup) else ProcessGroup.unbox(handle)
    return str(group.group_name)
