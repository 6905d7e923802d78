"""A plan made from a fake trace with compiled blocks lands on a run whose blocks are compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.executor.test_fake_plan_lands import fake_trace, landed, setup_of
from torch._inductor import config as inductor_config

import teraio
from teraio.contracts.hardware import Hardware


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_regions_find_their_storages(machine: Callable[..., Hardware]) -> None:
    setup = setup_of("tiny-llama", compile_blocks=True)
    trace = fake_trace(setup)
    torch._dynamo.reset()
    plan = teraio.plan(trace, machine(gpu_memory=trace.peak_allocated_bytes * 6 // 10))
    assert len(plan.moves) > 10
    # Regions of PyTorch's own operators: as the compiler cuts them, but compiled without C++.
    with inductor_config.patch(fallback_by_default=True, fx_graph_cache=False):
        result = landed(setup, plan)
    torch._dynamo.reset()
    assert result.share_found == 1
    report = result.report
    assert (report.substituted_kernels, report.drift, report.demand_fetches) == (0, 0, 0)
