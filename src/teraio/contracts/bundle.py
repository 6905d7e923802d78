"""Bundles: a directory of Parquet tables with one metadata block and one hash over all of them.

Traces, plans and timelines are bundles. Page checksums are written and verified (a flipped bit in a
data page would otherwise read back as another number), and every file carries the hash of the whole
bundle, so that files of two versions cannot be mixed.
"""

from __future__ import annotations

import hashlib
import json
import types
import warnings
from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from teraio.contracts.output import recover_directory, replacing_directory
from teraio.contracts.table import Table
from teraio.errors import InputError, OffloadWarning

FORMAT_VERSIONS = {"trace": 2, "plan": 1, "timeline": 1}
"""Of each kind. Traces: 2 added the calls behind the kernels."""

_KEY = b"teraio"

_ADDED_LATER = frozenset({"tokens"})
"""Fields of metadata that came after the first files: left out of the hash while they are None, so
that older files keep theirs."""

_TELLTALE_FILE = {
    "trace": "storages.parquet",
    "plan": "moves.parquet",
    "timeline": "events.parquet",
}

M = TypeVar("M")


def content_hash(tables: Mapping[str, Table], metadata: Any) -> str:
    """SHA-256 over all tables and the metadata: the identity that plans keep of their trace."""
    digest = hashlib.sha256(_metadata_text(metadata).encode())
    for name, table in tables.items():
        digest.update(f"[{name}]".encode())
        table.update_digest(digest)
    return digest.hexdigest()


def save_bundle(path: Path, kind: str, tables: Mapping[str, Table], metadata: Any) -> None:
    """Write tables (by name) and a metadata dataclass to the directory ``path``, atomically.

    Raises InputError if something that is not teraio's stands at ``path``.
    """
    import pyarrow.parquet as pq

    block = json.dumps(
        {
            "kind": kind,
            "format_version": FORMAT_VERSIONS[kind],
            "hash": content_hash(tables, metadata),
            "metadata": asdict(metadata),
        },
        allow_nan=False,
    )
    with replacing_directory(path) as temporary:
        for name, table in tables.items():
            arrow = table.to_arrow().replace_schema_metadata({_KEY: block})
            pq.write_table(
                arrow,
                temporary / f"{name}.parquet",
                compression="zstd",
                write_page_checksum=True,
            )


def load_bundle(
    path: Path, kind: str, tables: Mapping[str, type[Table]], metadata_class: type[M]
) -> tuple[dict[str, Any], M, str]:
    """Read what :func:`save_bundle` wrote, verifying checksums, kind, version and hash: the tables,
    the metadata and the hash.

    Raises InputError that names the file and what is wrong with it.
    """
    if recover_directory(path):
        message = f"{path}: a save was interrupted; the version before it was restored"
        warnings.warn(message, OffloadWarning, stacklevel=3)
    _check_is_bundle(path, kind)
    loaded: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for name, table_class in tables.items():
        file = path / f"{name}.parquet"
        arrow, block = _read_file(file)
        first = first or block
        _check_block(block, first, kind, file)
        loaded[name] = table_class.from_arrow(arrow, str(file))
    metadata = build_dataclass(metadata_class, first.get("metadata"), str(path))
    if content_hash(loaded, metadata) != first["hash"]:
        raise InputError(f"{path}: the content does not match its hash; the files were changed")
    return loaded, metadata, first["hash"]


def _check_is_bundle(path: Path, kind: str) -> None:
    """Tell a missing directory, something else, and a bundle of another kind apart."""
    if not path.exists():
        raise InputError(f"{path}: no such {kind} directory")
    if not path.is_dir():
        raise InputError(f"{path}: is a file, not a {kind}, which is a directory NAME.{kind}")
    for other in ("trace", "plan", "timeline"):
        if other != kind and (path / _TELLTALE_FILE[other]).is_file():
            is_of_this_kind = (path / _TELLTALE_FILE[kind]).is_file()
            if not is_of_this_kind:
                raise InputError(f"{path}: is a {other}, not a {kind}")


def _read_file(file: Path) -> tuple[Any, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise InputError(f"{file}: missing; the bundle is incomplete")
    try:
        arrow = pq.ParquetFile(file, page_checksum_verification=True).read()
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{file}: not readable as Parquet ({reason})") from None
    try:
        block = json.loads((arrow.schema.metadata or {})[_KEY])
    except (KeyError, ValueError):
        block = None
    if not isinstance(block, dict):
        raise InputError(f"{file}: has no teraio metadata block")
    return arrow, block


def _check_block(block: dict[str, Any], first: dict[str, Any], kind: str, file: Path) -> None:
    if block.get("kind") != kind:
        raise InputError(f"{file}: holds a {block.get('kind')}, not a {kind}")
    version, found = FORMAT_VERSIONS[kind], block.get("format_version")
    if found != version:
        is_newer = isinstance(found, int) and found > version
        remedy = "update teraio" if is_newer else f"make the {kind} anew"
        raise InputError(
            f"{file}: format version {found} is not {version}, which this teraio reads; {remedy}"
        )
    if block.get("hash") != first.get("hash"):
        raise InputError(f"{file}: belongs to another save than the files beside it (hash differs)")


def build_dataclass(cls: type[M], values: Any, where: str) -> M:
    """A dataclass from a mapping; InputError names an unknown, missing or mistyped field."""
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: expected fields of {cls.__name__}, got {values!r}")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise InputError(f"{where}: unknown field {name}")
    for name, field in known.items():
        is_required = field.default is NO_DEFAULT and field.default_factory is NO_DEFAULT
        if is_required and name not in values:
            raise InputError(f"{where}: field {name} is missing")
    result = cls(**values)
    for name, hint in get_type_hints(cls).items():
        if name in known and not _is_instance(getattr(result, name), hint):
            wanted = getattr(hint, "__name__", hint)
            raise InputError(f"{where}.{name}: must be {wanted}, got {getattr(result, name)!r}")
    return result


def _is_instance(value: Any, hint: Any) -> bool:
    """Whether a value fits a type hint, judged by its outermost type; an int serves as a float."""
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(_is_instance(value, part) for part in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else get_origin(hint) or hint)


def _metadata_text(metadata: Any) -> str:
    values = asdict(metadata)
    known = {k: v for k, v in values.items() if v is not None or k not in _ADDED_LATER}
    return json.dumps(known, sort_keys=True, allow_nan=False)
