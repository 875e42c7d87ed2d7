"""Optimizers on four real processes: what a simulation takes other paths for."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fmegatron import tree
from fmegatron.checkpoint import load, save
from fmegatron.optim import (
    adafactor,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    ema_params,
    muon,
    muon_labels,
    partition,
    sgd,
    with_stochastic_rounding,
)
from fmegatron.spec import Param
from tests.optim_trees import close, made, ours, placed
from tests.processes import processes

R, S = Replicate(), Shard
SPEC = {
    "embed": Param((8, 8), "vocab embed"),
    "layers": {
        i: {
            "q": Param((8, 2, 2, 4), "embed kv group head"),
            "o": Param((2, 2, 4, 8), "kv group head embed"),
            "up": Param((8, 16), "embed mlp"),
            "experts": Param((4, 8, 12), "expert embed mlp"),
            "norm": Param((8,), "embed"),
        }
        for i in range(3)
    },
}
LAYOUTS = [
    {"q": (S(1), S(0)), "o": (S(0), S(3)), "up": (S(1), S(1)), "experts": (S(0), S(1)), "norm": (R, S(0))},
    {"q": (R, R), "o": (R, S(2)), "up": (S(0), S(0)), "experts": (S(2), R), "norm": (R, R)},
]


def values(seed, dtype=torch.float64):
    flat = made(seed, dtype, {n: p.shape for n, p in tree.named(SPEC).items()})
    return tree.like(SPEC, [flat[n] for n in tree.paths(SPEC)])


def optimizers():
    return {
        "muon": chain(
            clip_by_global_norm(1.0),
            partition(muon_labels(SPEC), {"muon": muon(0.1, spec=SPEC), "adamw": adamw(0.01)}),
            ema(0.5),
        ),
        "adafactor": chain(clip_by_global_norm(1.0), adafactor(spec=SPEC, beta1=0.9), ema(0.5)),
        "rounding": chain(with_stochastic_rounding(sgd(2.0**-9), 5), ema(0.5)),
    }


def worst(name, layout, donate):
    """The largest difference to one device after two updates, of parameters and of their average."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    by = {"embed": (S(0), R), "layers": dict.fromkeys(range(3), LAYOUTS[layout])}
    dtype = torch.bfloat16 if name == "rounding" else torch.float64
    optimizer = optimizers()[name]
    want, state = ours(optimizer, values(0, dtype), [values(1, dtype), values(2, dtype)])
    p = placed(values(0, dtype), mesh, by)
    s = optimizer.init(p)
    for seed in (1, 2):
        p, _, s = optimizer.update(p, placed(values(seed, dtype), mesh, by), s, donate=donate)

    def apart(x, y):
        return max(
            (a.full_tensor() - b).abs().max().item() for a, b in zip(tree.leaves(x), tree.leaves(y), strict=True)
        )

    return apart(p, want), apart(ema_params(s), ema_params(state))


def saved(folder, name, layout):
    """Save the state after an update, from four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    by = {"embed": (S(0), R), "layers": dict.fromkeys(range(3), LAYOUTS[layout])}
    optimizer = optimizers()[name]
    p = placed(values(0), mesh, by)
    p, _, s = optimizer.update(p, placed(values(1), mesh, by), optimizer.init(p))
    save(folder, {"params": p, "opt": s}, step=1)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_checkpoint_of_four_ranks_goes_on_alone(name, tmp_path):
    """Rows and columns of sharded matrices, and leaves of several optimizers, come back whole under their own names."""
    processes(4).run(saved, str(tmp_path), name, 0)
    optimizer = optimizers()[name]
    found = load(tmp_path, {"params": values(0), "opt": optimizer.init(values(0))})
    params, state = ours(optimizer, values(0), [values(1)])
    close((found["params"], found["opt"]), (params, state), 1e-12)
    want, _, _ = optimizer.update(params, values(2), state)
    got, _, _ = optimizer.update(found["params"], values(2), found["opt"])
    close(got, want, 1e-12)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_four_processes_equal_one(name, layout):
    for found in processes(4).run(worst, name, layout, layout == 1):
        assert max(found) <= (0.0 if name == "rounding" else 1e-12)
