"""Replicas that differ in one bit are found, with the leaf, the ranks and the step."""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist

from fmegatron import job, tree
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw
from fmegatron.random import key
from fmegatron.replicas import ReplicaError, _mixed, check_replicas, hash_of
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import simulate
from fmegatron.spec import init
from fmegatron.step import TrainState
from fmegatron.zero import with_sharded_state
from tests.processes import processes
from tests.test_train import on, patch
from tests.train_runs import flags, go, write_corpus

torch.set_num_threads(1)
pytestmark = pytest.mark.xdist_group("gloo")

MODEL = Decoder(DecoderConfig(vocab=24, embed=16, layers=2, heads=4, kv_heads=2, head=2, mlp=20))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_hash_of_a_leaf_is_of_every_bit_and_its_place(dtype):
    x = (torch.randn(7, 9, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    assert hash_of(x) == hash_of(x.clone())
    seen = {int(hash_of(x))}
    for i in range(x.numel()):
        y = x.clone()
        bits = y.view(-1) if dtype == torch.bool else y.view(-1).view(torch.uint8)
        bits[i] = ~bits[i] if dtype == torch.bool else bits[i] ^ 1
        seen.add(int(hash_of(y)))
    assert len(seen) == x.numel() + 1
    if dtype.is_floating_point:
        assert hash_of(-x) != hash_of(x)
        assert hash_of(x.flip(0)) != hash_of(x) and hash_of(torch.zeros(3)) != hash_of(-torch.zeros(3))


def test_bits_are_mixed_by_splitmix64():
    """Its first numbers for the seed 1234567, as its authors' program prints them."""
    places = torch.arange(1, 6)
    found = [n % 2**64 for n in _mixed(1234567 + places * -7046029254386353131).tolist()]
    assert found == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_large_leaf_is_hashed_in_parts(monkeypatch):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    want = hash_of(x)
    monkeypatch.setattr("fmegatron.replicas.CHUNK", 7)
    assert hash_of(x) == want


def state_on(mesh, **options):
    sh = Sharding(mesh, standard_rules(mesh, **options))
    params = init(MODEL.spec(), key(0), sh=sh)
    optimizer = with_sharded_state(adamw(1e-2), MODEL.spec(), sh)
    return TrainState(3, params, optimizer.init(params), key(1))


def spoil(x, rank):
    """Flips the last bit of an element that a simulated rank holds."""
    values = x._local_tensor._local_tensors
    values[rank] = values[rank].clone()
    values[rank].view(-1).view(torch.int32)[-1] ^= 1


CASES = {
    # of what, on which mesh, rank: who is told
    "dp": ("dp=4", {}, "params.layers.1.up", 2, ((0, 1, 3), (2,))),
    "of a part": ("dp=2,tp=2", {}, "params.layers.1.up", 3, ((1,), (3,))),
    "of a norm": ("dp=2,tp=2", {"zero": 1}, "params.layers.0.norm1", 0, ((1, 2, 3), (0,))),
    "of what the state cuts no further": ("dp=2,fsdp=2", {"store": "fsdp"}, "opt.", 1, ((1,), (3,))),
}


@pytest.mark.parametrize("name", CASES)
def test_one_bit_on_one_rank_is_found(name):
    axes, options, leaf, rank, ranks = CASES[name]
    with simulate(4):
        mesh = make_mesh(axes, kv_heads=2, device="cpu")
        state = state_on(mesh, **options)
        check_replicas(state, mesh)
        leaves = tree.named(state)
        leaf = leaf if leaf in leaves else next(n for n in leaves if n.startswith("opt.") and n.endswith("layers.1.up"))
        spoil(leaves[leaf], rank)
        with pytest.raises(ReplicaError) as caught:
            check_replicas(state, mesh, step=7)
    groups = tuple(sorted(caught.value.leaves[leaf]))
    assert caught.value.leaves.keys() == {leaf} and groups == tuple(sorted(ranks))
    assert str(caught.value).startswith(f"step 7: replicas differ: {leaf} (rank")


def test_what_no_two_ranks_share_may_differ():
    with simulate(4):
        mesh = make_mesh("dp=4", device="cpu")
        state = state_on(mesh, store="dp")
        spoil(tree.named(state)["params.layers.1.up"], 2)
        check_replicas(state, mesh)
    check_replicas({"w": torch.ones(3)}, None)


# ------------------------------------------------------------------------------------------------------------- train


def straying(arguments, leaf, step, stop=None):
    """`go` where on the last rank a leaf changes by one bit behind a step."""
    with contextlib.ExitStack() as stack:

        def make_run(*given, real=job.make_run):
            run = real(*given)

            def stepped(state, batch):
                state, metrics = run.step(state, batch)
                if state.step == step and dist.get_rank() == dist.get_world_size() - 1:
                    x = tree.named(state)[leaf]
                    (x.to_local() if hasattr(x, "to_local") else x).view(-1).view(torch.int32)[0] ^= 1
                return state, metrics

            return dataclasses.replace(run, step=stepped)

        patch(stack, job, "make_run", make_run)
        return go(arguments)


@pytest.mark.parametrize(
    ("mesh", "leaf", "ranks"),
    [
        (("--mesh", "dp=2"), "params.layers.0.norm1", "rank 0 unlike rank 1"),
        (
            ("--mesh", "pp=2", "--batch.microbatches", "2", "--model-overrides.tied", "True"),
            "params.embed",
            "rank 0 unlike rank 1",
        ),
    ],
)
def test_a_run_whose_replicas_differ_ends_before_it_is_saved(tmp_path, mesh, leaf, ranks):
    corpus, out = write_corpus(tmp_path / "text.jsonl"), tmp_path / "run"
    given = flags(
        corpus, out, *mesh, "--check-replicas", "2", "--model-overrides.layers", "2", steps=6, checkpoint_every=2
    )
    assert processes(2).run(straying, given, leaf, 3) == [1, 1]
    log = (out / "log.txt").read_text()
    assert "stopped: step 4: replicas differ: " in log and f"{leaf} ({ranks})" in log
    assert "the newest checkpoint is" in log and log.count("step_00000002") == 1
    assert on(2, ["--out", str(out), "--resume"]) == 0  # which compares too, and finds nothing
