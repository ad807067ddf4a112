"""Outputs that are written where they belong, and those that must not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpspan.parallel.pipeline_output import DirectOutput, MovedOutput, as_tuple
from tpspan.parallel.pipeline_watch import Call
from tpspan.tools.bench.transformer import Block


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x), self.b(x), x


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x).chunk(2, dim=-1)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


class Twice(nn.Module):
    """A part that is called again, operations between, and outputs of a part within."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.block = Block(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        z = self.inner(y) + x
        return z, y * 2, self.block(x), z + y


CASES: list[tuple[nn.Module, tuple[int, ...], list[int]]] = [
    (nn.Sequential(Block(8, 2), Block(8, 2)), (2, 5, 8), []),
    (nn.Linear(8, 8), (4, 8), []),
    (nn.Linear(8, 8), (2, 4, 8), []),
    (nn.Linear(8, 8, bias=False), (2, 4, 8), []),
    (nn.Sequential(nn.Linear(8, 8), nn.GELU()), (4, 8), []),
    (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), (4, 8), []),
    (Several(), (4, 8), [2]),
    (Halves(), (4, 8), [0, 1]),
    (Twice(), (2, 4, 8), []),
    # autograd keeps the output of these for the backward pass
    (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (4, 8), [0]),
    (nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), (4, 8), [0]),
    # no form that writes where it is told
    (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (4, 8), [0]),
]


@pytest.mark.parametrize("module,shape,left", CASES)
def test_outputs_lie_in_their_place(
    module: nn.Module, shape: tuple[int, ...], left: list[int]
) -> None:
    direct = DirectOutput(module)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        x = torch.randn(shape, requires_grad=True)
        places: dict[int, torch.Tensor] = {}

        def place(number: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            assert number not in places  # noqa: B023
            return places.setdefault(number, torch.full(shape, 7.0, dtype=dtype))  # noqa: B023

        output, missing = direct.call(lambda: module(x), place)  # noqa: B023
        found.append(missing)
        outputs, expected = as_tuple(output), as_tuple(module(x))
        for number, (mine, other) in enumerate(zip(outputs, expected, strict=True)):
            assert mine.equal(other) and mine.grad_fn is not None or mine is x
            assert (number in places) == (number not in missing)
            if number in places:
                assert mine.data_ptr() == places[number].data_ptr()
        wanted = [x, *module.parameters()]
        gradient = torch.randn_like(expected[0])
        for memory in places.values():
            memory.detach().fill_(float("nan"))  # the reader's by now
        pairs = zip(
            torch.autograd.grad(outputs[0], wanted, gradient, allow_unused=True),
            torch.autograd.grad(expected[0], wanted, gradient, allow_unused=True),
            strict=True,
        )
        assert all(a is b is None or (a is not None and a.equal(b)) for a, b in pairs)
    everything = list(range(len(as_tuple(module(torch.randn(shape))))))
    assert found == [everything, left, left]


def test_few_operations_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs some 15 µs; a block has dozens."""
    seen: list[Any] = []
    monkeypatch.setattr(Call, "add", lambda call, operation: seen.append(operation))
    module = nn.Sequential(Block(8, 2), Block(8, 2))
    direct = DirectOutput(module)
    numbers = []
    for _ in range(2):
        seen.clear()
        x = torch.randn(2, 5, 8, requires_grad=True)
        direct.call(lambda: module(x), lambda n, shape, dtype: torch.empty(shape))  # noqa: B023
        numbers.append(len(seen))
    assert numbers[0] > 20 and numbers[1] <= 2, numbers


def test_recomputed_layers() -> None:
    module = Recomputed()
    direct = DirectOutput(module)
    for number in range(3):
        x = torch.randn(2, 5, 8, requires_grad=True)
        output, left = direct.call(lambda: module(x), lambda n, shape, dtype: torch.empty(shape))  # noqa: B023
        output.sum().backward()
        expected = torch.autograd.grad(module.block(x).sum(), x)[0]
        assert x.grad is not None and x.grad.equal(expected)
        assert left == ([0] if number == 0 else left)


def test_without_gradients_and_other_ways_of_running() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    direct = DirectOutput(module)

    def run() -> list[int]:
        x = torch.randn(4, 8)
        return direct.call(lambda: module(x), lambda n, shape, dtype: torch.empty(shape))[1]

    assert [run(), run()] == [[0], [0]]  # kept for the backward pass
    with torch.no_grad():
        assert [run(), run()] == [[0], []]
    with torch.inference_mode():
        assert run() == []
    module.eval()
    with torch.no_grad():
        assert [run(), run()] == [[0], []]


def test_a_module_that_does_something_else() -> None:
    """Other operations before: copied. Another output than expected: refused."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.mood = "plain"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mood == "early":
                x = x + 1
            y: torch.Tensor = self.inner(x)
            return y * 2 if self.mood == "late" else y

    module = Fickle()
    direct = DirectOutput(module)

    def run(size: int = 4) -> list[int]:
        x = torch.randn(size, 8)
        return direct.call(lambda: module(x), lambda n, shape, dtype: torch.empty(shape))[1]

    assert [run(), run()] == [[0], []]
    assert run(5) == [0]
    module.mood = "early"
    assert run() in ([0], [])
    module.mood = "late"
    with pytest.raises(MovedOutput, match="direct=False"):
        run()
    module.mood = "plain"
    assert run() == []


def test_an_error_in_the_module_leaves_nothing_behind() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    direct = DirectOutput(module)

    def run(width: int) -> list[int]:
        x = torch.randn(4, width)
        return direct.call(lambda: module(x), lambda n, shape, dtype: torch.empty(shape))[1]

    for width in (9, 8, 9):
        if width == 9:
            with pytest.raises(RuntimeError):
                run(width)
        else:
            run(width)
    assert run(8) == []
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not torch._C._len_torch_dispatch_stack()
