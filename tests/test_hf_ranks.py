"""Hugging Face folders on real processes: sharded by load_hf, gathered by save_hf."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig, load_hf, save_hf
from fmegatron.random import key
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.spec import abstract, init, local_bytes
from tests.checkpoint_ranks import Ranks

MODEL = Decoder(DecoderConfig(vocab=61, embed=24, layers=2, heads=6, kv_heads=3, head=4, mlp=37, tied=True))


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()


def layout(mesh: str) -> Sharding:
    made = make_mesh(mesh, device="cpu", kv_heads=3)
    return Sharding(made, standard_rules(made, store=("dp",), uneven={"vocab": 61, "mlp": 37}))


def there_and_back(source: str, target: str, mesh: str) -> tuple[int, int, bool]:
    """(bytes held, bytes planned, are all leaves DTensors) of what was loaded, which is then saved."""
    sh = layout(mesh)
    model, params = load_hf(source, sh=sh)
    planned = local_bytes(abstract(model.spec(), sh=sh))
    save_hf(target, model, params, max_shard_bytes=4000)
    return local_bytes(params), planned, all(isinstance(x, DTensor) for x in tree.leaves(params))


def refused(source: str, target: str) -> str:
    """What a rank sees when rank 0 cannot write."""
    model, params = load_hf(source, sh=layout("dp=2,tp=2"))
    try:
        save_hf(target, model, params)
    except UserError as e:
        return str(e)
    return ""


@pytest.mark.parametrize(("mesh", "world"), [("dp=2,tp=2", 4), ("dp=1,tp=3", 3), ("dp=4", 4)])
def test_shards_are_loaded_and_saved_as_the_whole(ranks, tmp_path, mesh, world):
    params = init(MODEL.spec(), key(0))
    save_hf(tmp_path / "a", MODEL, params)
    results = ranks.run(world, there_and_back, str(tmp_path / "a"), str(tmp_path / "b"), mesh)
    assert all(sharded for _, _, sharded in results)
    total = sum(x.nbytes for x in tree.leaves(params))
    assert all(held == planned < total / 2 for held, planned, _ in results)
    before = load_file(tmp_path / "a" / "model.safetensors")
    after = {n: x for file in (tmp_path / "b").glob("*.safetensors") for n, x in load_file(file).items()}
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert "lm_head.weight" not in after


def test_a_refusal_on_rank_zero_reaches_all(ranks, tmp_path):
    save_hf(tmp_path / "a", MODEL, init(MODEL.spec(), key(0)))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    seen = ranks.run(4, refused, str(tmp_path / "a"), str(tmp_path / "used"))
    assert all("is not empty and no earlier export" in message for message in seen)
