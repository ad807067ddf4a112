"""Parameters that lie once in the world: identity, values, memory, refusals, rights, the end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness import Ranks
from tpspan.parallel.regions import Slots, check_shareable, dense_stride, group

PAGE = 2 << 20
# The collective steps differ from launcher to launcher only in the control plane below.
FEW = pytest.mark.ranks(1, 3, launchers=("mpirun",))
PAIR = pytest.mark.ranks(2, launchers=("mpirun",))


@pytest.mark.ranks()
def test_a_real_module_keeps_identity_values_ties_and_strides(ranks: Ranks) -> None:
    ranks.run("bodies.models:share_a_real_module")


@FEW
def test_ranks_may_have_the_module_on_meta(ranks: Ranks) -> None:
    ranks.run("bodies.models:share_where_only_rank_0_is_real")


@pytest.mark.ranks()
def test_memory_is_divided_and_not_multiplied(ranks: Ranks) -> None:
    values = ranks.run("bodies.models:memory_is_divided", num_layers=20)
    model = values[0][0]
    for _, own, _ in values:
        assert own <= 1.05 * model / ranks.size + 2 * PAGE
    assert sum(held for _, _, held in values) <= 1.05 * model + 2 * PAGE
    # The kernel rounds down what a third of a page is.
    assert sum(held for _, _, held in values) >= 0.99 * model


@FEW
def test_a_model_smaller_than_a_page(ranks: Ranks) -> None:
    values = ranks.run("bodies.models:memory_is_divided", num_layers=0)
    assert sum(own for _, own, _ in values) <= PAGE
    ranks.run("bodies.models:nothing_to_share")


@PAIR
def test_an_optimizer_steps_for_all(ranks: Ranks) -> None:
    ranks.run("bodies.models:step_of_an_optimizer")


@pytest.mark.ranks(2, 3, launchers=("mpirun",))
@pytest.mark.parametrize("difference", ["shape", "dtype", "tie", "name", "options"])
def test_modules_that_differ_are_refused_on_all_ranks(ranks: Ranks, difference: str) -> None:
    texts = ranks.run("bodies.models:structures_differ", difference=difference)
    assert len(set(texts)) == 1
    assert f"rank {ranks.size - 1}:" in texts[0]


@PAIR
@pytest.mark.parametrize("kind", ["sparse", "lazy", "expanded", "overlap", "subclass", "shared"])
def test_what_one_rank_refuses_fails_on_all(ranks: Ranks, kind: str) -> None:
    ranks.run("bodies.models:refused_on_one_rank", kind=kind)


@pytest.mark.ranks(2, launchers=("mpirun",), backends=("host",))  # on CUDA it costs the context
def test_a_write_to_frozen_parameters_fails_in_the_writer(ranks: Ranks) -> None:
    ranks.run("bodies.models:a_write_to_frozen_parameters_fails")


@PAIR
def test_closing_leaves_nothing_dangling(ranks: Ranks) -> None:
    ranks.run("bodies.models:close_waits_for_other_tensors")
    ranks.run("bodies.models:a_dropped_module_is_not_copied")
    ranks.run("bodies.models:a_copy_is_private")


@pytest.mark.ranks(2, 3, launchers=("mpirun",))
def test_an_error_inside_with_asks_no_other_rank(ranks: Ranks) -> None:
    ranks.run("bodies.models:an_error_inside_with_asks_no_other_rank")
    ranks.run("bodies.models:an_error_inside_with_leaves_views_alone")


def test_one_parameter_under_several_names_is_one_region() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    module["c"] = module["a"]
    regions = group(Slots(module, buffers=False).named)
    assert [region.names for region in regions] == [
        ("a.weight", "b.weight", "c.weight"),
        ("a.bias", "c.bias"),
        ("b.bias",),
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_over_the_same_elements_are_one_region(device: str) -> None:
    memory = torch.empty(4, 4, device=device)
    module = nn.Module()
    module.first, module.second = nn.Parameter(memory), nn.Parameter(memory)
    (region,) = group(Slots(module, buffers=False).named)
    assert region.names == ("first", "second")
    assert len(region.tensors) == 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_overlaps_that_are_no_ties_are_refused(device: str) -> None:
    memory = torch.empty(8, 8, device=device)
    for first, second, overlap in [
        (memory, memory.T, True),
        (memory[:5], memory[4:], True),
        (memory[:4], memory[4:], False),
        (memory[:, :4], memory[:, 4:], False),
        (memory[:, :5], memory[:, 4:], True),
        (memory[0, :2], memory[1, :1].view(torch.int32), False),
    ]:
        regions = group([("first", first), ("second", second)])
        if overlap:
            with pytest.raises(ValueError, match="first and second overlap"):
                check_shareable(regions)
        else:
            check_shareable(regions)


def test_strides_without_gaps() -> None:
    assert dense_stride(torch.empty(4, 8)[:, :4]) == (4, 1)
    assert dense_stride(torch.empty(4, 8).T) == (1, 8)
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert dense_stride(image) == image.stride()


def test_a_parameter_computed_from_others_is_refused() -> None:
    weight = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(ValueError, match="weight is computed from other tensors"):
        check_shareable(group([("weight", weight)]))


def test_slots_name_what_modules_name_in_the_same_order() -> None:
    shared, norm = nn.LSTM(4, 4), nn.BatchNorm1d(3)
    parts = nn.Sequential(shared, norm)
    parts.register_buffer("table", torch.ones(2), persistent=False)
    parts.register_module("nothing", None)
    module = nn.ModuleDict({"b": parts, "a": shared, "c": nn.Linear(2, 2, bias=False)})
    slots = Slots(module, buffers=True)
    expected = [
        (f"{prefix}.{key}" if prefix else key, tensor)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for kind in (part._parameters, part._buffers)
        for key, tensor in kind.items()
        if tensor is not None
    ]
    assert [name for name, _ in slots.named] == [name for name, _ in expected]
    assert all(a is b for (_, a), (_, b) in zip(slots.named, expected, strict=True))
    assert slots.optional == {"b.table"}
    old = shared._parameters["weight_ih_l0"]
    assert old is not None
    new = nn.Parameter(torch.zeros_like(old))
    slots.put(old, new)
    assert shared.weight_ih_l0 is shared._flat_weights[0] is new
    statistics = norm.running_mean
    assert statistics is not None
    slots.put(statistics, torch.ones(3))
    assert norm.running_mean is not statistics
