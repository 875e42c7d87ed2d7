"""The harness finds deliberate defects in shipped code, each modelled on a bug that a real framework shipped: a numeric
difference on a layout that is drawn by default, which shrinks to a small one. On one device none of them changes a bit."""

import functools
import importlib

import pytest
import torch

from fmegatron import collectives, zero
from fmegatron.accumulate import Weight
from fmegatron.models import decoder
from fmegatron.optim import norm
from fmegatron.sharding import Sharding
from fmegatron.testing import Layout, compare, shrink
from fmegatron.testing.covering import space
from fmegatron.testing.models import find_model

accumulate = importlib.import_module("fmegatron.accumulate")  # the module; the package has the function of this name
MODELS = ["llama,layers=1", "llama,layers=1,tied=1"]
QUICK = ("gradients",)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@functools.cache
def drawn():
    """What is checked by default, here of up to 4 ranks."""
    return list(space(MODELS, 4).cases(1, 0))


def first_caught():
    """(the first drawn case that fails, the smallest layout for its model, how that one fails)."""
    for case in drawn():
        model = find_model(case.model)
        if not (result := compare(model, case.layout, checks=QUICK)).ok:
            break
    else:
        raise AssertionError("no layout caught it")
    assert max(d.error for d in result.differences) < float("inf"), "an exception or NaN is no numeric difference"
    small = shrink(model, case.layout, lambda x: not compare(model, x, checks=QUICK).ok)
    return case, small, compare(model, small, checks=QUICK)


def dropped_reduction(patch):
    """The sum of the gradients of what is used alike on tp is dropped (sequence parallelism's norms, Megatron)."""
    kept = collectives.run_step
    patch.setattr(collectives, "run_step", lambda x, mesh, s: x * 1 if s.kind == "P>I" else kept(x, mesh, s))


def counted_twice(patch):
    """A layer's gradients are summed over data ranks twice (pytorch #160285; titan #2318)."""
    kept = zero.moving

    def moving(xs, params, sh, what):
        arrive = kept(xs, params, sh, what)
        return lambda: [x * sh.mesh.size(sh.axes("batch")) for x in arrive()] if sh.mesh else arrive()

    patch.setattr(zero, "moving", moving)


def mean_of_means(patch):
    """Each microbatch is divided by its own tokens (transformers #34191)."""
    parts = [1]
    cut, evaluate = accumulate.cut_batch, accumulate.evaluate

    def counted(batch, ctx, n):
        parts[0] = n
        return cut(batch, ctx, n)

    def own_mean(terms, stats, known, scale, sh, *more):
        found = {}
        for name, term in terms.items():
            counts = accumulate.summed((term.items != 0).double(), term.dims, sh)
            found[name] = (scale[name][0], accumulate.reciprocal(counts) / parts[0])
        return evaluate(terms, stats, known, found if parts[0] > 1 else scale, sh, *more)

    patch.setattr(accumulate, "cut_batch", counted)
    patch.setattr(accumulate, "evaluate", own_mean)


def position_offset(patch):
    """Positions count from the start of a rank's own part of the sequence (Megatron's context parallelism)."""
    kept = decoder.rotary_table
    patch.setattr(decoder, "rotary_table", lambda at, *a, **k: kept(at - at[..., :1], *a, **k))


def norm_of_replicas(patch):
    """The norm sums replicated leaves over all ranks (torchtune #2420)."""
    kept = norm._sharded

    def everywhere(x):
        mesh, dims = kept(x)
        if not hasattr(x, "device_mesh"):
            return mesh, dims
        return x.device_mesh, tuple(d for d in range(x.device_mesh.ndim) if x.device_mesh.size(d) > 1)

    patch.setattr(norm, "_sharded", everywhere)


def padding_in_the_weight(patch):
    """On a mesh the loss is divided by all tokens, those that do not count too."""
    kept = accumulate.scales

    def local(weights, sh):
        if sh.mesh is None or sh.mesh.world == 1:
            return kept(weights, sh)
        found = {}
        for name, w in weights.items():
            whole = Weight(torch.ones_like(w.items, dtype=torch.float64), w.dims)
            found |= kept({name: whole}, sh)
        return found

    patch.setattr(accumulate, "scales", local)


BREAKS = {
    dropped_reduction: (2, "gradients"),
    counted_twice: (2, "gradients"),
    mean_of_means: (1, "gradients"),
    position_offset: (2, "gradients"),
    norm_of_replicas: (2, "norms"),
    padding_in_the_weight: (2, "gradients"),
}


@pytest.mark.parametrize("broken", BREAKS, ids=lambda f: f.__name__)
def test_a_defect_is_caught_and_shrinks(broken, monkeypatch):
    broken(monkeypatch)
    assert compare(find_model(MODELS[0]), "dp=1", checks=QUICK).ok, "it must pass on one device"
    case, small, result = first_caught()
    ranks, what = BREAKS[broken]
    print(f"{broken.__name__}: first {case.layout}, smallest {small}")
    assert small.world == ranks, (case, small)
    assert what in {d.what for d in result.differences if d.share > 1}
    plain = Layout()
    options = [
        n
        for n in ("sp", "zero", "store", "state", "remat", "context", "packed")
        if getattr(small, n) != getattr(plain, n)
    ]
    assert len(options) <= 1, small


def test_dropout_by_local_rows_is_caught(monkeypatch):
    """Every data rank draws the masks of the first rows (Paddle FleetX #1005)."""
    kept = accumulate.with_rows
    monkeypatch.setattr(
        accumulate, "with_rows", lambda ctx, batch: ctx.replace(rows=(r := kept(ctx, batch).rows) - r[:1])
    )
    model = find_model("llama,layers=1,dropout=0.2")
    assert compare(model, "dp=1", checks=QUICK).ok
    assert not compare(model, "dp=2", checks=QUICK).ok


def test_a_wrong_place_at_rest_is_caught(monkeypatch):
    """Shards are cut in another order than their placements say (pytorch #129206): by the tensors, not by our words."""
    kept = Sharding.positions
    monkeypatch.setattr(Sharding, "positions", lambda sh, axes, *a, **k: kept(sh, tuple(reversed(axes)), *a, **k))
    result = compare(find_model("llama,layers=1"), "fsdp=2,dp=2 zero=3", checks=("init", "gradients"))
    assert not result.ok and any(d.what == "init" and d.share > 1 for d in result.differences)
