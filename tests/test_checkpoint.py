"""Checkpoints of one process: contents, folders, refusals."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from safetensors.torch import load_file

from fmegatron import checkpoint, random, tree
from fmegatron.checkpoint import writing
from fmegatron.errors import UserError

torch.set_num_threads(1)


@dataclass(frozen=True)
class State:
    step: int
    params: Any
    opt: Any
    key: Any


NAMES = ("step", "params", "opt", "key")
optree.register_pytree_node(
    State,
    lambda s: (tuple(getattr(s, n) for n in NAMES), None, NAMES),  # type: ignore[arg-type]
    lambda _, children: State(*children),
    namespace=tree.NAMESPACE,
)


def example() -> State:
    """A state with every kind of leaf, among them those that safetensors does not take as they are."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(7, 5, generator=generator)
    params = {
        "embed": shared,
        "head": shared,  # tied: one storage, two names
        "layers": {i: {"q": torch.randn(3, 4, generator=generator).bfloat16()} for i in (0, 2, 10)},
        "transposed": torch.randn(3, 4, generator=generator).t(),
        "view": shared[1:4, 2:3],
        "frozen": None,
        "grad": torch.ones(2, requires_grad=True),
    }
    other = {
        "count": 12,
        "rate": 0.1 + 0.2,
        "name": "é",
        "on": True,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none of it": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64),
    }
    return State(step=100, params=params, opt=other, key=random.fold_in(random.key(2**63 + 5), 3))


def meta(state: Any) -> Any:
    return tree.tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x, state)


def equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and a == b
    bits = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def assert_equal(a: Any, b: Any) -> None:
    assert tree.structure(a) == tree.structure(b)
    assert [n for n, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True) if not equal(x, y)] == []


def test_everything_comes_back_bit_by_bit(tmp_path):
    state = example()
    path = checkpoint.save(tmp_path, state, step=100, meta={"model": {"embed": 5}})
    assert path == tmp_path / "checkpoints" / "step_00000100"
    for like in (state, meta(state)):
        loaded = checkpoint.load(tmp_path, like)
        assert_equal(loaded, state)
        assert all(x.device.type == "cpu" for x in tree.leaves(loaded) if isinstance(x, torch.Tensor))
    assert checkpoint.read_meta(path) == {"model": {"embed": 5}}
    assert (checkpoint.info(tmp_path).step, checkpoint.saved_dtype(path, "params.layers.10.q")) == (100, torch.bfloat16)


def test_loading_leaves_like_alone_and_makes_new_tensors(tmp_path):
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, step=1)
    like = {"w": torch.zeros(3, requires_grad=True)}
    loaded = checkpoint.load(tmp_path, like)
    assert like["w"].tolist() == [0, 0, 0] and loaded["w"].tolist() == [1, 1, 1] and not loaded["w"].requires_grad


def test_files_are_plain_safetensors_and_json(tmp_path):
    path = checkpoint.save(tmp_path, example(), step=100)
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".safetensors"]
    held = load_file(next(path.glob("*.safetensors")))
    assert torch.equal(held["params.layers.10.q"], example().params["layers"][10]["q"])
    values = json.loads((path / "state.json").read_text())["values"]
    assert values["opt.count"] == 12 and values["key.words.0"] < 2**32 and values["params.frozen"] is None


def test_a_large_state_goes_to_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "FILE_BYTES", 100)
    path = checkpoint.save(tmp_path, example(), step=100)
    sizes = [sum(t.nbytes for t in load_file(p).values()) for p in path.glob("*.safetensors")]
    assert len(sizes) > 4 and all(s <= max(100, 7 * 5 * 4) for s in sizes)
    assert_equal(checkpoint.load(path, meta(example())), example())


def test_a_state_without_tensors(tmp_path):
    checkpoint.save(tmp_path, {"step": 3}, step=3)
    assert checkpoint.load(tmp_path, {"step": 0}) == {"step": 3}


def test_a_part_is_loaded_alone(tmp_path):
    checkpoint.save(tmp_path, example(), step=100)
    assert_equal(checkpoint.load_part(tmp_path, "params", meta(example().params)), example().params)
    loaded = checkpoint.load(tmp_path, {"params": {"embed": torch.empty(7, 5)}}, strict=False)
    assert torch.equal(loaded["params"]["embed"], example().params["embed"])
    with pytest.raises(UserError, match="1 only in it: params.embed"):
        checkpoint.load_part(tmp_path, "params", {k: v for k, v in meta(example().params).items() if k != "embed"})


def test_another_dtype_is_refused_or_converted(tmp_path):
    checkpoint.save(tmp_path, {"w": torch.tensor([1.0, 1 / 3])}, step=1)
    like = {"w": torch.empty(2, dtype=torch.float64)}
    with pytest.raises(
        UserError, match=r"1 of another dtype: w \(float32 in it, float64 here\) \(cast=True converts\)"
    ):
        checkpoint.load(tmp_path, like)
    assert torch.equal(checkpoint.load(tmp_path, like, cast=True)["w"], torch.tensor([1.0, 1 / 3]).double())


def test_a_checkpoint_of_another_model_is_refused_by_name_before_anything_is_made(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"a": torch.ones(2, 3), "b": {i: torch.ones(1) for i in range(20)}, "n": 1}, step=1)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("allocated"))
    like = {"a": torch.ones(3, 2), "c": torch.ones(1), "n": "text"}
    with pytest.raises(UserError) as caught:
        checkpoint.load(tmp_path, like)
    text = str(caught.value)
    assert "step_00000001 does not fit: 1 missing in it: c; 20 only in it: b.0, b.1," in text
    assert "b.7, … and 12 more" in text
    assert "1 of another kind: n (a number in it, a str here)" in text
    assert "1 of another shape: a ([2, 3] in it, [3, 2] here)" in text


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ({"x": object()}, {}, "leaf 'x' of the state is a object"),
        ({"a.b": 1, "a": {"b": 2}}, {}, "two leaves of the state have the dotted name 'a.b'"),
        ({"x": 1}, {"meta": {"f": torch.float32}}, "meta cannot be written as JSON"),
        ({"x": 1}, {"step": -1}, "step=-1 must be"),
        ({"x": 1}, {"keep": 0}, "keep=0 must be"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_nothing_written(tmp_path, state, options, message):
    with pytest.raises(UserError, match=message):
        checkpoint.save(tmp_path / "new", state, **{"step": 1, **options})
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to .*file/checkpoints"):
        checkpoint.save(tmp_path / "file", {"x": 1}, step=1)


def test_a_full_disk_leaves_the_one_before_and_no_rubbish(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, step=1)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        checkpoint.save(tmp_path, {"w": torch.zeros(3)}, step=2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert checkpoint.load(tmp_path, {"w": torch.empty(3)})["w"].tolist() == [1, 1, 1]


def saved(tmp_path: Any, *steps: int, keep: int | None = None) -> list[str]:
    for step in steps:
        checkpoint.save(tmp_path, {"w": torch.full((3,), float(step))}, step=step, keep=keep)
    return sorted(p.name for p in (tmp_path / "checkpoints").iterdir())


def test_the_newest_are_kept(tmp_path):
    assert saved(tmp_path, 1, 2, 3, 4, keep=2) == ["step_00000003", "step_00000004"]


def test_after_going_back_the_last_saved_is_the_newest(tmp_path):
    saved(tmp_path, 100, 300)
    assert saved(tmp_path, 200, keep=1) == ["step_00000200"]


def test_saving_a_step_again_replaces_it(tmp_path):
    saved(tmp_path, 5, 6)
    checkpoint.save(tmp_path, {"w": torch.zeros(3)}, step=5)
    assert checkpoint.load(tmp_path, {"w": torch.empty(3)})["w"].tolist() == [0, 0, 0]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_00000005", "step_00000006"]


def test_a_run_its_checkpoints_and_one_checkpoint_are_found(tmp_path):
    saved(tmp_path, 5, 6)
    folder = tmp_path / "checkpoints"
    assert checkpoint.resolve(tmp_path) == checkpoint.resolve(folder) == folder / "step_00000006"
    assert checkpoint.resolve(folder / "step_00000005") == folder / "step_00000005"
    shutil.copytree(folder / "step_00000005", tmp_path / "copy")
    assert checkpoint.resolve(tmp_path / "copy") == tmp_path / "copy"
    assert checkpoint.latest(tmp_path / "copy") is None


def truncate(path: Any) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "state.json").unlink(), "step_00000002 is no complete checkpoint: it has no state.json"),
        (lambda f: truncate(f / "state.json"), "state.json is damaged"),
        (lambda f: (f / "state.json").write_text('{"format": 99}'), "of another version"),
        (lambda f: (f / "state.json").write_text('{"format": 1, "tensors": {}}'), "state.json is damaged: .*files"),
        (
            lambda f: truncate(next(f.glob("*.safetensors"))),
            "model-00001-of-00001.safetensors is damaged: it has .* bytes",
        ),
        (lambda f: next(f.glob("*.safetensors")).unlink(), "model-00001-of-00001.safetensors is missing"),
        (lambda f: (f / "more.safetensors").write_bytes(b""), "more.safetensors is no part of this checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_its_file_and_passed_over(tmp_path, damage, message):
    saved(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints" / "step_00000002"
    damage(folder)
    with pytest.raises(UserError, match=message):
        checkpoint.load(folder, {"w": torch.empty(3)})
    assert checkpoint.latest(tmp_path).name == "step_00000001"
    assert checkpoint.load(tmp_path, {"w": torch.empty(3)})["w"].tolist() == [1, 1, 1]
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000001")
    with pytest.raises(UserError, match=f"none of the 1 there is complete; the last: .*{message}"):
        checkpoint.resolve(tmp_path)


def test_no_checkpoint_at_all(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None
    with pytest.raises(UserError, match="there is nothing of this name"):
        checkpoint.resolve(tmp_path / "absent")
    with pytest.raises(UserError, match="no checkpoint in .*checkpoints"):
        checkpoint.load(tmp_path, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="there is a file of this name"):
        checkpoint.resolve(tmp_path / "file")


def test_what_killed_saves_left_is_removed_by_the_next(tmp_path):
    saved(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step_00000001", folder / ".tmp-step_00000002")
    shutil.copytree(folder / "step_00000001", folder / ".tmp-old-step_00000000")
    shutil.copytree(folder / "step_00000001", folder / "step_00000001.replaced")
    assert saved(tmp_path, 3) == ["step_00000001", "step_00000003"]
