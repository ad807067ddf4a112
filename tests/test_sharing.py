"""Published memory: what readers see, what versions cost, and what is refused."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tpspan
from bodies.sharing import PAGE, model, set_up, tensors
from harness import leaks
from sharing_processes import ON_EACH_DEVICE, Actor, listing, own_keeper, wait_until
from tpspan.errors import (
    CaptureError,
    ClosedError,
    InUseError,
    PublicationMismatch,
    UnknownNameError,
    VersionGoneError,
)


@pytest.fixture(autouse=True)
def keeper() -> Iterator[str]:
    with own_keeper() as directory:
        yield directory


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    cases = getattr(request.node, "callspec", None)
    set_up("cpu" if cases is None else cases.params.get("device", "cpu"))
    before = leaks.take()
    yield
    assert leaks.settle(before)[1] == {}


def held(name: str) -> int:
    """Bytes that the keeper holds for a name."""
    return next(each["held_bytes"] for each in listing() or () if each["name"] == name)


@ON_EACH_DEVICE
def test_what_is_published_is_read_in_place_and_flips_by_version(device: str) -> None:
    with Actor() as publisher, Actor() as reader:
        publisher.do("snapshot", device)
        reader.do("snapshot", device)
        assert publisher.do("publish", "x", 1, device=device) == 1
        assert reader.do("attach", "x") == 1
        assert reader.do("value_of") == 1
        publisher.do("write", 2)
        assert reader.do("value_of") == 1, "nobody sees what was not committed"
        assert reader.do("update") == (False, 1)
        assert publisher.do("commit") == 2
        assert reader.do("value_of") == 1, "nobody sees a version before the update"
        assert reader.do("update") == (True, 2)
        assert reader.do("value_of") == 2
        assert reader.do("update") == (False, 2)
        reader.do("detach")
        publisher.do("unpublish")
        assert publisher.do("leaked") == {}
        assert reader.do("leaked") == {}
        assert (publisher.end(), reader.end()) == (0, 0)


@ON_EACH_DEVICE
def test_a_version_costs_what_changed(device: str, no_leaks: None) -> None:
    with tpspan.publish(tensors(1, device, 10), "x", block_nbytes=PAGE, keep=2) as p:
        whole = held("x")
        assert whole == PAGE * len(p.layout.sizes)
        p["w3"].fill_(5)
        assert p.commit() == 2
        # A tensor of nearly a page lies in two blocks, if it does not begin with one.
        assert held("x") - whole <= 2 * PAGE
        p["w3"].fill_(6)
        p["w7"].fill_(6)
        assert p.commit(changed=["w3"]) == 3
        with tpspan.attach("x") as a:
            assert [int(a[name][0]) for name in ("w3", "w7", "w1")] == [6, 1, 1]
        assert p.commit() == 4, "what was not named is still there to be committed"
        with tpspan.attach("x") as a, tpspan.attach("x", version=3) as old:
            assert (int(a["w7"][0]), int(old["w7"][0])) == (6, 1)
        before = held("x")
        assert p.commit() == 5, "a version in which nothing has changed costs nothing"
        assert held("x") <= before
        with pytest.raises(KeyError, match="w99"):
            p.commit(changed=["w99"])
        p.close(remove=True)


@ON_EACH_DEVICE
def test_read_only_publications_cost_their_tensors_once(device: str, no_leaks: None) -> None:
    p = tpspan.publish(tensors(1, device, 4), "x", block_nbytes=PAGE, read_only=True)
    memory = p._working
    assert memory.open == ()
    assert all(memory.mapped.block(i) is p._published.block(i) for i in memory.places)  # type: ignore[attr-defined]
    address = p["w0"].data_ptr()
    p.thaw("w2")
    assert memory.open == p.layout.places_of(["w2"])
    assert int(p["w2"][5]) == 1, "memory of its own, with the same content"
    p["w2"].fill_(7)
    with tpspan.attach("x") as a:
        assert int(a["w2"][0]) == 1
        assert p.commit() == 2
        assert memory.open == ()
        assert a.update()
        assert [int(a[name][9]) for name in ("w1", "w2", "w3")] == [1, 7, 1]
    assert p["w0"].data_ptr() == address
    p.thaw()
    assert memory.open == memory.places
    assert p.commit() == 3
    assert memory.open == ()
    assert held("x") == PAGE * len(p.layout.sizes) + PAGE * len(p.layout.places_of(["w2"])) - (
        PAGE * len(p.layout.places_of(["w2"]))
    ), "nothing has changed from version 2 to 3"
    p.close(remove=True)


def test_writing_where_one_may_not_ends_the_writer_and_changes_nothing() -> None:
    """Invariant 12."""
    with Actor() as publisher, Actor() as reader, Actor() as writer:
        publisher.do("publish", "x", 1, read_only=True)
        for one in (reader, writer):
            one.do("attach", "x")
        writer.tell("poke")
        writer._process.join(20.0)
        assert writer._process.exitcode == -signal.SIGSEGV
        assert reader.do("value_of") == 1
        publisher.tell("commit")
        assert publisher.hear() == 2
        publisher.do("unpublish")


def test_writable_and_replicated_attachments(no_leaks: None) -> None:
    with tpspan.publish(tensors(1), "x", block_nbytes=PAGE) as p:
        with (
            tpspan.attach("x", writable=True) as shared,
            tpspan.attach("x", replicate=True) as own,
            tpspan.attach("x") as other,
        ):
            shared["w0"].fill_(3)
            own["w1"].fill_(4)
            assert [int(other[n][0]) for n in ("w0", "w1")] == [3, 1]
            p["w2"].fill_(5)
            p.commit(changed=["w2"])
            assert own.update()
            assert [int(own[n][0]) for n in ("w1", "w2")] == [4, 5] or int(own["w1"][0]) == 1
        p.close(remove=True)


def test_a_part_of_the_names(no_leaks: None) -> None:
    with tpspan.publish(tensors(1, num_blocks=6), "x", block_nbytes=PAGE) as p:
        with tpspan.attach("x", names=["w4", "value"]) as a:
            assert {"w4", "value"} <= set(a)
            assert "w0" not in list(a)
            assert len(a) < len(p)
            p["w4"].fill_(2)
            p["w0"].fill_(2)
            p.commit()
            assert a.update()
            assert int(a["w4"][0]) == 2
            with pytest.raises(KeyError, match="w0 is not among the names"):
                a["w0"]
            assert len(a._mapped.places) < len(p.layout.sizes)
        with pytest.raises(KeyError, match="nothing"):
            tpspan.attach("x", names=["nothing"])
        p.close(remove=True)


@ON_EACH_DEVICE
@pytest.mark.parametrize("meta", [False, True])
def test_modules_are_published_and_attached_with_ties_and_buffers(
    device: str, meta: bool, no_leaks: None
) -> None:
    module = model(1, device=device)
    weight, norm = module["embed"].weight, module["norm"]
    p = tpspan.publish(module, "m")
    assert module["embed"].weight is weight
    assert module["head"].weight is weight
    mine = model(2, meta=meta)
    a = tpspan.attach_module(mine, "m", device=None if device == "cpu" else device)
    assert mine["head"].weight is mine["embed"].weight
    ids = torch.arange(8, device=weight.device)

    def out(each: Any) -> torch.Tensor:
        each.eval()
        with torch.inference_mode():
            return each["head"](each["norm"](each["embed"](ids))) + each.table.sum()

    assert torch.equal(out(mine), out(module))
    module.train()
    module["norm"](module["embed"](ids)).sum().backward()  # the buffers change as well
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    before = out(mine)
    assert not torch.equal(before, out(module))
    assert p.commit() == 2
    assert torch.equal(out(mine), before)
    assert a.update()
    assert torch.equal(out(mine), out(module))
    a.close()
    assert torch.equal(out(mine), out(module)), "private now, with the same values"
    mine["embed"].weight.data.add_(1)
    module.zero_grad()
    p.close(remove=True)
    del norm
    assert module["embed"].weight is weight


def test_a_module_whose_tensors_were_moved_is_committed_as_it_is() -> None:
    module = model(1)
    p = tpspan.publish(module, "m")
    module["embed"].weight = module["head"].weight = nn.Parameter(torch.ones(64, 32))
    module["norm"].weight.data = torch.full((32,), 3.0)
    assert p.commit() == 2
    with tpspan.attach("m") as a:
        assert float(a["head.weight"].mean()) == 1
        assert float(a["norm.weight"].mean()) == 3
    with torch.no_grad():
        module["embed"].weight.fill_(2)  # it lies in the publication again
    p.commit()
    with tpspan.attach("m") as a:
        assert float(a["embed.weight"].mean()) == 2
    module["head"] = nn.Linear(32, 5)
    module["norm"] = module["norm"].double()
    with pytest.raises(PublicationMismatch) as caught:
        p.commit()
    for said in ("head.weight is (5, 32)", "head.bias is new", "float64 and was", "norm.bias"):
        assert said in str(caught.value)
    assert p.version == 3
    module["head"] = None
    p.close(remove=True)


def test_a_module_that_does_not_fit_is_told_all_differences() -> None:
    p = tpspan.publish(model(1).state_dict(), "m")
    other = model(2)
    other["head"] = nn.Linear(31, 64)
    other["norm"] = nn.BatchNorm1d(32).half()
    other["more"] = nn.Linear(2, 2)
    other["embed"] = None
    before = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    with pytest.raises(PublicationMismatch) as caught:
        tpspan.attach_module(other, "m")
    for said in (
        "head.weight is (64, 32) there and (64, 31) here",
        "norm.weight is torch.float32 there and torch.float16 here",
        "missing there: head.bias; more.weight; more.bias",
    ):
        assert said in str(caught.value)
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == before
    untied = nn.ModuleDict({"embed": nn.Embedding(64, 32)})
    with pytest.raises(PublicationMismatch, match=r"unexpected there: norm.weight; norm.bias"):
        tpspan.attach_module(untied, "m")
    with tpspan.attach_module(untied, "m", strict=False):
        pass
    p.close(remove=True)


def test_a_training_state_of_tensors_and_plain_values() -> None:
    net = nn.Linear(4, 4)
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.ones(1, 4)).sum().backward()
    adam.step()

    def state(step: int) -> dict[str, Any]:
        return {
            "model": net.state_dict(),
            "optimizer": adam.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
            "note": b"x",
        }

    p = tpspan.publish(state(1), "job")
    adam.step()
    a = tpspan.attach("job")
    first = a.state()
    assert first["step"] == 1
    assert first["note"] == b"x"
    assert first["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert not torch.equal(first["model"]["weight"], net.weight)
    assert p.commit(state(2)) == 2
    assert a.update()
    second = a.state()
    assert second["step"] == 2
    assert torch.equal(second["model"]["weight"], net.weight)
    assert torch.equal(first["model"]["weight"], net.weight), "the same tensor, flipped"
    with torch.no_grad():
        p["model.weight"].add_(1)
    assert p.commit() == 3
    assert a.update()
    assert a.state()["step"] == 2, "plain values are those of the last commit that gave some"
    twin = nn.Linear(4, 4)
    twin.load_state_dict(second["model"])
    torch.optim.AdamW(twin.parameters()).load_state_dict(second["optimizer"])
    with pytest.raises(PublicationMismatch, match="optimizer.state.0.exp_avg is missing"):
        p.commit({**state(3), "optimizer": {}})
    with pytest.raises(TypeError, match="step is a set"):
        p.commit({**state(3), "step": {1}})
    del first, second
    a.close()
    p.close(remove=True)


def test_a_dict_on_meta_is_allocated_and_filled() -> None:
    p = tpspan.publish({"a": torch.empty(5, device="meta")}, "x", read_only=True)
    assert p.version == 0
    with pytest.raises(tpspan.UnknownNameError):
        tpspan.attach("x")
    p["a"].copy_(torch.arange(5.0))
    assert p.commit() == 1
    with tpspan.attach("x") as a:
        assert a["a"].tolist() == [0, 1, 2, 3, 4]
    p.close(remove=True)


def test_tensors_without_elements_scalars_strides_and_small_types() -> None:
    given = {
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "strided": torch.arange(12.0).view(3, 4).T,
        "bool": torch.tensor([True, False, True]),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(3, dtype=torch.complex64),
    }
    with tpspan.publish(given, "x") as p, tpspan.attach("x") as a:
        for name, tensor in given.items():
            assert torch.equal(a[name], tensor)
            assert a[name].stride() == tensor.stride() or not tensor.numel()
        p.close(remove=True)


@ON_EACH_DEVICE
def test_waiting_for_versions_and_being_called_back(device: str) -> None:
    with Actor() as publisher, Actor() as reader:
        publisher.do("publish", "x", 1, device=device)
        reader.do("attach", "x")
        reader.do("listen")
        reader.tell("wait_and_flip", 2)
        publisher.do("write", 2)
        publisher.do("commit")
        committed = time.time()
        seen, value = reader.hear()
        assert value == 2
        assert seen - committed < 0.1
        assert publisher.do("next_version", 3) == 3
        time.sleep(0.05)
        assert reader.do("heard")[-1] == 3
        with tpspan.attach("x") as a, pytest.raises(TimeoutError, match="version 9 of 'x' was not"):
            a.wait_for(9, timeout_s=0.02)
        reader.do("detach")
        publisher.do("unpublish")


def test_old_versions_go_and_their_readers_stay() -> None:
    p = tpspan.publish(tensors(1), "x", keep=2, block_nbytes=PAGE)
    slow = tpspan.attach("x")
    for value in (2, 3, 4):
        for tensor in p.values():
            tensor.fill_(value)
        del tensor
        p.commit()
    assert held("x") == 2 * PAGE * len(p.layout.sizes)
    assert int(slow["w0"][0]) == 1, "its memory stays as long as it is mapped"
    with pytest.raises(VersionGoneError, match="version 1 of 'x' is gone: the keeper has 3, 4"):
        tpspan.attach("x", version=1)
    with pytest.raises(VersionGoneError, match="no version 9 yet"):
        slow.update(9)
    assert slow.version == 1
    assert slow.update(3)
    assert (int(slow["w0"][0]), slow.version) == (3, 3)
    assert slow.update()
    assert int(slow["w0"][0]) == 4
    slow.close()
    p.close(remove=True)


def test_a_name_that_is_removed_and_published_anew_begins_to_count_again() -> None:
    heard: list[int] = []

    def anew(value: int) -> Any:
        return tpspan.publish(tensors(value, num_blocks=1), "x", block_nbytes=PAGE)

    p = anew(1)
    assert [p.commit() for _ in range(4)] == [2, 3, 4, 5]
    a = tpspan.attach("x")
    a.on_version(heard.append)
    assert p.commit() == 6
    assert a.wait_for() == 6
    wait_until(lambda: heard == [6])
    assert a.update()
    p.close(remove=True)
    assert a.newest() == 0, "there is none"
    with pytest.raises(UnknownNameError):
        a.wait_for()
    p = anew(2)
    assert a.newest() == 1
    wait_until(lambda: heard == [6, 1])
    with pytest.raises(TimeoutError, match="version 6 of 'x' was not .* the newest is 1"):
        a.wait_for(6, timeout_s=0.02)
    assert a.wait_for() == 1
    assert int(a["value"]) == 1
    assert a.update()
    assert (a.version, int(a["value"])) == (1, 2)
    assert not a.update()
    with pytest.raises(TimeoutError, match="version 2"):
        a.wait_for(timeout_s=0.02)
    assert p.commit() == 2
    assert a.wait_for() == 2
    a.close()
    p.close(remove=True)


def test_update_to_the_number_that_is_mapped_flips_if_the_name_was_published_anew() -> None:
    p = tpspan.publish(tensors(1, num_blocks=1), "x", block_nbytes=PAGE)
    a = tpspan.attach("x")
    assert not a.update(1)
    p.close(remove=True)
    p = tpspan.publish(tensors(2, num_blocks=1), "x", block_nbytes=PAGE)
    assert a.wait_for() == 1
    assert a.update(1)
    assert int(a["value"]) == 2
    assert not a.update(1)
    a.close()
    p.close(remove=True)


def test_a_callback_hears_of_a_version_that_comes_while_it_begins_to_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[int] = []
    p = tpspan.publish(tensors(1, num_blocks=1), "x", block_nbytes=PAGE)
    a = tpspan.attach("x")
    say = a._listening.say

    def say_after_a_commit(message: dict[str, Any]) -> None:
        p.commit()
        say(message)

    monkeypatch.setattr(a._listening, "say", say_after_a_commit)
    a.on_version(heard.append)
    wait_until(lambda: heard == [2])
    a.close()
    p.close(remove=True)


def test_a_reader_that_sees_only_the_last_of_the_news_sees_that_the_name_was_removed() -> None:
    """It was removed and published anew, with the number that is mapped, before it looks."""
    given = tensors(1, num_blocks=1)
    p = tpspan.publish(given, "x", block_nbytes=PAGE)
    with Actor() as reader:
        reader.do("attach", "x")
        reader.signal(signal.SIGSTOP)
        for _ in range(500):  # more news than a socket holds
            p.commit(changed=())
        p.close(remove=True)
        p = tpspan.publish(tensors(7, num_blocks=1), "x", block_nbytes=PAGE)
        (seen,) = tpspan.published()
        assert seen["versions"][0]["readers"] == [], "it reads what was removed"
        assert sum(seen["readers_of_gone_versions"].values(), []) == [reader.pid]
        reader.signal(signal.SIGCONT)
        assert reader.do("update") == (True, 1)
        assert reader.do("value_of") == 7
        assert reader.do("update") == (False, 1)
        reader.do("detach")
    p.close(remove=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_captured_graph_reads_the_version_that_is_mapped() -> None:
    """Invariant 7."""
    with Actor() as publisher:
        publisher.do("publish", "x", 1, device="cuda")
        a = tpspan.attach("x")
        weight, out = a["w0"], torch.zeros(8, device="cuda")
        out.copy_(weight[:8] * 2)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out.copy_(weight[:8] * 2)
            a.record_stream(torch.cuda.current_stream())
            with pytest.raises(CaptureError):
                a.update()
        for version in (2, 3):
            assert publisher.do("next_version", version) == version
            graph.replay()
            assert out.tolist() == [2.0 * (version - 1)] * 8
            assert a.update()
            graph.replay()
            assert out.tolist() == [2.0 * version] * 8
        del weight
        a.close()
        publisher.do("unpublish")


@ON_EACH_DEVICE
def test_flips_show_no_torn_version(device: str) -> None:
    flips = _flips(device, 500)
    assert flips > 20


@pytest.mark.slow
@ON_EACH_DEVICE
def test_ten_thousand_flips_show_no_torn_version(device: str) -> None:
    _flips(device, 10_000)


def _flips(device: str, count: int) -> int:
    with Actor() as publisher, Actor() as reader, Actor() as other:
        publisher.do("publish", "x", 1, device=device, num_blocks=2)
        for each in (reader, other):
            each.do("attach", "x")
            each.tell("flip_until", count)
        publisher.tell("commit_many", 2, count)
        publisher.hear(timeout_s=600.0)
        flips = [int(each.hear(timeout_s=600.0)) for each in (reader, other)]
        assert held("x") == 2 * 2 * PAGE
        publisher.do("unpublish")
        return min(flips)


def test_workers_share_one_copy() -> None:
    workers = [Actor() for _ in range(4)]
    try:
        p = tpspan.publish(tensors(1, num_blocks=8), "x", read_only=True)
        for worker in workers:
            worker.do("attach", "x")
        for worker in workers:
            worker.tell("held")
        for worker in workers:
            worker.hear()
        total = sum(worker.do("held") for worker in workers)
        assert total <= 1.05 * p.layout.span_nbytes
        (seen,) = tpspan.published()
        assert sorted(seen["versions"][0]["readers"]) == sorted(w.pid for w in workers)
        p.close(remove=True)
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)


def test_closing_and_what_is_still_in_use() -> None:
    p = tpspan.publish(tensors(1), "x")
    a = tpspan.attach("x")
    mine, theirs = a["w0"], p["w0"]
    with pytest.raises(InUseError, match="1 tensors attached from 'x' are still alive"):
        a.close()
    with pytest.raises(InUseError, match="1 tensors of the publication 'x'"):
        p.close()
    assert float(mine[0]) == 1
    del mine, theirs
    for each in (a, p):
        each.close()
        each.close()
    for step in (a.update, lambda: a["w0"], p.commit, p.thaw, lambda: p["w0"]):
        with pytest.raises(ClosedError):
            step()
    assert "closed" in repr(a) + repr(p)
    tpspan.remove("x")


@pytest.mark.parametrize("meta", [False, True])
def test_a_refused_close_leaves_everything_as_it_was(meta: bool) -> None:
    given = model(1)
    p = tpspan.publish(given, "m")
    mine = model(2, meta=meta)
    a = tpspan.attach_module(mine, "m")

    def places() -> list[int]:
        return [each.data_ptr() for m in (mine, given) for each in m.state_dict().values()]

    before, row = places(), torch.ones(1, 32, requires_grad=True)
    for taken in (
        lambda: [a["norm.bias"], p["norm.bias"]],
        lambda: [each["head"].weight.data.view(-1) for each in (mine, given)],
        lambda: [row @ each["head"].weight.T for each in (mine, given)],  # its graph holds it
    ):
        held = taken()
        for each in (a, p):
            with pytest.raises(InUseError, match="1 tensors .* are still alive"):
                each.close()
        assert places() == before
        assert mine["head"].weight is mine["embed"].weight
        assert a.version == p.version
        with torch.no_grad():
            given["head"].weight.add_(1)
        p.commit()
        assert a.update(), "it is in use as before"
        assert torch.equal(mine["head"].weight, given["head"].weight)
        held.clear()
    values = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    a.close()
    p.close(remove=True)
    assert not set(places()) & set(before)
    assert all(torch.equal(tensor, values[name]) for name, tensor in mine.state_dict().items())


def test_descriptors_of_a_small_limit_are_enough() -> None:
    """The keeper sends in batches, which are imported and closed one by one."""
    p = tpspan.publish({"x": torch.zeros(70 * PAGE // 4)}, "x", block_nbytes=PAGE)
    with tpspan.attach("x") as a:
        assert len(a._mapped.places) == 70
    assert len(list(Path("/proc/self/fd").iterdir())) > 140, "on the host a block is a descriptor"
    p.close(remove=True)
