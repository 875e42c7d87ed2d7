"""Checkpoints between meshes of real processes."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from tests import checkpoint_ranks as work


@pytest.fixture(scope="module")
def ranks():
    pool = work.Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def saved_by_four(ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("run"))
    ranks.run(4, work.save, folder, 4, 100)
    return folder


@pytest.mark.parametrize("world", [4, 3, 2])
def test_four_ranks_save_and_any_number_loads(ranks, saved_by_four, world):
    assert ranks.run(world, work.load, saved_by_four, world) == [[]] * world


def test_one_process_without_a_group_loads_what_four_saved(saved_by_four):
    assert work.load(saved_by_four, 1) == []


def test_four_ranks_load_what_one_process_and_what_three_saved(ranks, tmp_path):
    work.save(str(tmp_path / "one"), 1, 5)
    ranks.run(3, work.save, str(tmp_path / "three"), 3, 5)
    assert ranks.run(4, work.load, str(tmp_path / "one"), 4) == [[]] * 4
    assert ranks.run(4, work.load, str(tmp_path / "three"), 4) == [[]] * 4


def test_every_element_is_written_once(saved_by_four):
    """Replicated and plain tensors are written by one rank; the sum over the files is the size of the global state."""
    folder = next((work.checkpoint.latest(saved_by_four)).glob("..")) / "step_00000100"
    held: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        for name, x in load_file(file).items():
            held[name] = held.get(name, 0) + x.numel()
    expected = {f"params.layers.0.{n}": work.value(n).numel() for n in work.LEAVES} | {"plain": 5}
    assert held == expected
    assert len(list(folder.glob("*.safetensors"))) == 4
    tables = json.loads((folder / "state.json").read_text())
    assert tables["values"] == {"count": 7, "params.layers.10.frozen": None}
    assert tables["tensors"]["params.layers.0.uneven"] == {"shape": [7, 5], "dtype": "float64"}


@pytest.mark.parametrize("world", [4, 2])
def test_a_rank_reads_and_allocates_only_its_shards(ranks, saved_by_four, world):
    for shard, read, made in ranks.run(world, work.bytes_read, saved_by_four, world):
        assert read == made == shard


def test_ranks_that_disagree_are_refused_everywhere_and_nothing_is_written(ranks, tmp_path):
    seen = ranks.run(3, work.disagree, str(tmp_path))
    assert all("'count' of the state is 0 on one rank and 1 on rank 1" in message for message in seen)
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_one_rank_reaches_all(ranks, tmp_path):
    assert all("'bad' of the state is a object" in message for message in ranks.run(3, work.fail_on_one, str(tmp_path)))


def test_a_checkpoint_that_does_not_fit_one_rank_is_refused_on_all(ranks, tmp_path):
    assert all("1 of another shape: w" in message for message in ranks.run(3, work.misfit_on_one, str(tmp_path)))


def test_ranks_may_hold_different_leaves(ranks, tmp_path):
    assert ranks.run(3, work.stages, str(tmp_path)) == [([], 3)] * 3
