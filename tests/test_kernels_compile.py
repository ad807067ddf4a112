"""Kernels are compiled without a GPU, and launched on one."""

from __future__ import annotations

import pytest

from kernel_cases import prepared_gpu
from tpspan import kernels
from tpspan.errors import DriverError


@pytest.fixture(scope="module")
def compilers() -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-python is not installed")
    for library in ("nvvm", "nvrtc"):
        try:
            pathfinder.load_nvidia_dynamic_lib(library)
        except pathfinder.DynamicLibNotFoundError:
            pytest.skip(f"numba needs lib{library} to compile for CUDA, and it is not installed")


@pytest.mark.parametrize("name", kernels.kernel_names())
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_compile_to_ptx_without_a_gpu(
    compilers: None, name: str, capability: tuple[int, int]
) -> None:
    ptx, symbol = kernels.compile_ptx(name, capability)
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert f".entry {symbol}(" in ptx
    assert ".local" not in ptx, "nothing spills to memory"
    instructions = {
        "post": ["fence.acq_rel.sys", "st.release.sys"],
        "wait": ["ld.acquire.sys", "%globaltimer"],
        "barrier": ["st.release.sys", "ld.acquire.sys", "%globaltimer", "bar.sync"],
    }
    if name.startswith("ll_"):
        words = ["ld.relaxed.sys.global.v2.u64", "st.relaxed.sys.global.v2.u64", "bar.sync"]
        instructions[name] = [*words, "%globaltimer"]
        assert "fence.acq_rel" not in ptx
    for instruction in instructions.get(name, ["ld.global.L1::no_allocate.v2", "st.global.v2"]):
        assert instruction in ptx


@pytest.fixture(scope="module")
def gpu() -> int:
    return prepared_gpu()


@pytest.mark.cuda
def test_a_refused_launch_says_which_kernel(gpu: int) -> None:
    with pytest.raises(DriverError, match=r"cuLaunchKernel.*kernel='post'.*num_blocks=0"):
        kernels.kernel("post", gpu)(0, 0, 1, 0, 0)
