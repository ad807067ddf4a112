"""Kernels are compiled without a GPU, and launched on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_cases import prepared_gpu
from tpspan import kernels
from tpspan.errors import DriverError
from tpspan.kernels import compile as kernel_compiler


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
    assert ptx.count(".maxntid 512, 1, 1\n") == 1, "no more registers than its threads can have"
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


def test_what_was_compiled_is_kept_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_ptx(name: str, capability: tuple[int, int]) -> tuple[str, str]:
        compiled.append((name, capability))
        return f"ptx of {name}", name

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TPSPAN_KERNEL_CACHE", raising=False)
    monkeypatch.setattr(kernel_compiler, "compile_ptx", compile_ptx)
    for _ in range(2):
        assert kernel_compiler.cached_ptx("post", (9, 0), 13000) == ("ptx of post", "post")
    assert compiled == [("post", (9, 0))]
    kernel_compiler.cached_ptx("post", (8, 0), 13000)
    kernel_compiler.cached_ptx("wait", (9, 0), 13000)
    kernel_compiler.cached_ptx("post", (9, 0), 12080)
    assert len(compiled) == 4, "other devices, kernels and drivers have files of their own"
    monkeypatch.setattr(kernel_compiler, "_digest_of_sources", lambda: "changed")
    kernel_compiler.cached_ptx("post", (9, 0), 13000)
    assert len(compiled) == 5
    for path in tmp_path.rglob("ptx-*"):
        path.write_text(path.read_text().replace('"ptx of post"', "7"))
    assert kernel_compiler.cached_ptx("post", (9, 0), 13000) == ("ptx of post", "post")
    monkeypatch.setenv("TPSPAN_KERNEL_CACHE", "0")
    kernel_compiler.cached_ptx("post", (9, 0), 13000)
    assert len(compiled) == 7


@pytest.fixture(scope="module")
def gpu() -> int:
    return prepared_gpu()


@pytest.mark.cuda
def test_a_refused_launch_says_which_kernel(gpu: int) -> None:
    with pytest.raises(DriverError, match=r"cuLaunchKernel.*kernel='post'.*num_blocks=0"):
        kernels.kernel("post", gpu)(0, 0, 1, 0, 0)
