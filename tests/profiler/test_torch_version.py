"""Versions of PyTorch that would lose data are refused before anything runs."""

from __future__ import annotations

import re

import pytest
import torch

import teraio.executor
import teraio.profiler
from teraio.errors import MissingDependencyError
from teraio.profiler.torch_version import check_torch_version


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0+cu128", "1.13.1"])
def test_older_ones(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    message = rf"^PyTorch {re.escape(version)} is too old, teraio needs 2\.11 or newer"
    with pytest.raises(MissingDependencyError, match=message):
        check_torch_version()


@pytest.mark.parametrize(
    "version", ["2.11.0+cu130", "2.11.0a0+git1234", "2.13.0", "2.15.0", "3.0.0"]
)
def test_others(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check_torch_version()


@pytest.mark.parametrize(
    ("package", "name"), [(teraio.profiler, "profile"), (teraio.executor, "execute")]
)
def test_both_packages_ask(package: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(package, name, raising=False)
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(MissingDependencyError, match="too old"):
        getattr(package, name)
