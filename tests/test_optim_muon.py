"""Muon: against torch.optim.Muon and against the iteration's polynomial on singular values; global matrices of sharded
leaves; what is exchanged."""

import math
import sys
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim import (
    adamw,
    apply,
    chain,
    clip_by_global_norm,
    leaves,
    muon,
    muon_labels,
    newton_schulz,
    partition,
)
from fmegatron.optim.exchange import exchange_of
from fmegatron.optim.matrices import matrix_of
from fmegatron.simulation import lift, per_rank, simulate
from fmegatron.spec import Param
from tests.optim_trees import Count, cloned, close, made, ours, placed, same, same_on_ranks, simulated_mesh

QUINTIC = (3.4445, -4.7750, 2.0315)
SHAPES = {"high": (12, 8), "wide": (8, 12), "square": (8, 8), "more": {"wide": (8, 12)}}

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def by_singular_values(x, coefficients=(QUINTIC,) * 5, eps=1e-7):
    """U p(…p(S / |S|)) V^T in float64, without the iteration."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True).clamp(min=eps)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ v


def reference(params, gradients, views, *, lr, momentum=0.95, nesterov=True, weight_decay=0.1, adjust="original"):
    """The parameters by the paper's formula in float64. views: {path: (permutation, rows, columns, batch)}, outputs in
    rows."""
    p = {n: x.double().clone() for n, x in tree.named(params).items()}
    m = {n: torch.zeros_like(x) for n, x in p.items()}
    for grads in gradients:
        for n, g in tree.named(grads).items():
            g = g.double()
            m[n] = momentum * m[n] + (1 - momentum) * g
            u = momentum * m[n] + (1 - momentum) * g if nesterov else m[n]
            order, rows, columns = views[n]
            o = by_singular_values(u.permute(order).reshape(-1, rows, columns))
            o = o.view([u.shape[d] for d in order]).permute([order.index(d) for d in range(u.ndim)])
            factor = math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))
            p[n] = p[n] * (1 - lr * weight_decay) - lr * factor * o
    return tree.like(params, list(p.values()))


# Against others


@pytest.mark.parametrize("shape", [(3, 8, 12), (2, 6, 6), (1, 12, 5)])
def test_the_iteration_is_a_polynomial_of_singular_values(shape):
    x = torch.randn(shape, dtype=torch.float64)
    for coefficients in ((QUINTIC,) * 5, ((2.0, -1.5, 0.5),) * 3, ((4.0, -6.0, 3.0), (2.0, -1.5, 0.5))):
        got = newton_schulz(x, coefficients=coefficients)
        torch.testing.assert_close(got, by_singular_values(x, coefficients), rtol=1e-12, atol=1e-12)


def test_the_steps_are_nearly_orthogonal():
    """Jordan: the five steps take singular values into 0.7 … 1.2; a convergent iteration goes to one."""
    x = torch.randn(64, 128, dtype=torch.float64)
    s = torch.linalg.svdvals(newton_schulz(x[None])[0])
    assert 0.6 < s.min() and s.max() < 1.25
    exact = newton_schulz(x[None], coefficients=((1.875, -1.25, 0.375),) * 15)[0]
    torch.testing.assert_close(exact @ exact.T, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-9)


@needs_muon
@pytest.mark.parametrize(
    ("their", "our"),
    [
        ({}, {}),
        ({"nesterov": False, "momentum": 0.8}, {"nesterov": False, "momentum": 0.8}),
        ({"adjust_lr_fn": "match_rms_adamw"}, {"adjust_lr": "match_rms_adamw"}),
        ({"adjust_lr_fn": "original", "weight_decay": 0.4}, {"weight_decay": 0.4}),
        ({"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7}, {"coefficients": (2.0, -1.5, 0.5), "steps": 7}),
        ({"eps": 1e-2}, {"eps": 1e-2}),
    ],
)
@pytest.mark.parametrize("inputs_first", [False, True])
def test_equal_to_torch(their, our, inputs_first):
    """There matrices are [outputs, inputs], here too if we say so, else the parameters are the transposed ones."""
    params, gradients = made(0, shapes=SHAPES), [made(i, shapes=SHAPES) for i in range(1, 6)]
    turned = (lambda x: x.T.contiguous()) if inputs_first else (lambda x: x)
    held = [torch.nn.Parameter(turned(p).clone()) for p in tree.leaves(params)]
    peer = torch.optim.Muon(held, lr=0.1, **their)
    for grads in gradients:
        for p, g in zip(held, tree.leaves(grads), strict=True):
            p.grad = turned(g).clone()
        peer.step()
    optimizer = muon(0.1, dtype=torch.bfloat16, inputs_first=inputs_first, **our)
    for donate in (False, True):
        got, _ = ours(optimizer, params, gradients, donate)
        # the iteration in bfloat16 may round elsewhere for the transposed matrix
        want = tree.like(params, [turned(p.detach()) for p in held])
        close(got, want, 3e-2 if inputs_first else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_equal_to_the_formula(dtype, adjust, nesterov):
    params, gradients = made(0, dtype, SHAPES), [made(i, dtype, SHAPES) for i in range(1, 5)]
    views = {n: ([1, 0], x.shape[1], x.shape[0]) for n, x in tree.named(params).items()}
    want = reference(params, gradients, views, lr=0.1, adjust=adjust, nesterov=nesterov)
    got, state = ours(muon(0.1, adjust_lr=adjust, nesterov=nesterov), params, gradients)
    close(got, tree.tree_map(lambda x: x.to(dtype), want), 1e-12 if dtype == torch.float64 else 1e-4)
    assert state["count"] == 4 and set(state) == {"count", "momentum"}


# Matrices of leaves with more dims

SPEC = {
    "embed": Param((24, 8), "vocab embed"),
    "layers": {
        i: {
            "norm": Param((8,), "embed"),
            "q": Param((8, 4, 2, 4), "embed kv group head"),
            "k": Param((8, 4, 4), "embed kv head"),
            "k_bias": Param((4, 4), "kv head", decay=False),
            "o": Param((4, 2, 4, 8), "kv group head embed"),
            "gate": Param((8, 16), "embed mlp"),
            "down": Param((16, 8), "mlp embed"),
            "experts": Param((4, 8, 16), "expert embed mlp"),
        }
        for i in range(2)
    },
}
MATRICES = ("q", "k", "o", "gate", "down", "experts")
BLOCKS = {"layers": {i: {n: SPEC["layers"][i][n] for n in MATRICES} for i in range(2)}}
VIEWS = {
    "q": ([1, 2, 3, 0], 32, 8),
    "k": ([1, 2, 0], 16, 8),
    "o": ([3, 0, 1, 2], 8, 32),
    "gate": ([1, 0], 16, 8),
    "down": ([1, 0], 8, 16),
    "experts": ([0, 2, 1], 16, 8),
}


def values(spec, seed, dtype=torch.float64):
    shapes = tree.tree_map(lambda p: p, spec)
    generator = torch.Generator().manual_seed(seed)
    return tree.tree_map(lambda p: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype), shapes)


def views_of(spec):
    return {path: VIEWS[path.split(".")[-1]] for path in tree.paths(spec)}


def test_matrices_by_dims():
    params, gradients = values(BLOCKS, 0), [values(BLOCKS, i) for i in range(1, 4)]
    want = reference(params, gradients, views_of(BLOCKS), lr=0.1)
    for donate in (False, True):
        got, _ = ours(muon(0.1, spec=BLOCKS), params, gradients, donate)
        close(got, want, 1e-12)


def test_matrices_by_hand():
    """Each kv head's queries by themselves, and a matrix whose outputs come first."""
    params, gradients = values(BLOCKS, 0), [values(BLOCKS, i) for i in range(1, 4)]
    views = views_of(BLOCKS)
    for i in range(2):
        views[f"layers.{i}.q"] = ([1, 2, 3, 0], 8, 8)
        views[f"layers.{i}.q"] = ([1, 2, 3, 0], 8, 8)
    views["layers.0.gate"] = ([0, 1], 8, 16)
    want = reference(params, gradients, views, lr=0.1)
    by_hand = {"*.q": "embed -> group head", "layers.0.gate": "mlp -> embed"}
    got, _ = ours(muon(0.1, spec=BLOCKS, matrices=by_hand), params, gradients)
    close(got, want, 1e-12)


def test_matrix_of():
    def sides(dims):
        m = matrix_of(Param((2,) * len(dims.split()), dims))
        return None if m is None else (m.counts, m.rows, m.columns)

    assert sides("embed kv group head") == ((), (0,), (1, 2, 3))
    assert sides("kv group head embed") == ((), (0, 1, 2), (3,))
    assert sides("embed mlp") == ((), (0,), (1,)) and sides("state mlp") == ((), (0,), (1,))
    assert sides("embed expert") == ((), (0,), (1,)) and sides("expert mlp embed") == ((0,), (1,), (2,))
    for dims in ("embed", "kv head", "kv group head", "expert mlp", "expert embed", "kv embed head", "a b c"):
        assert sides(dims) is None, dims


# Sharded leaves

R, S = Replicate(), Shard
LAYOUTS = {
    "fsdp": {"q": (S(0), S(0), S(0)), "k": (S(0), S(0), S(0)), "o": (S(3), S(3), S(3)), "gate": (S(1), S(1), S(1)),
             "down": (S(0), S(0), S(0)), "experts": (S(2), S(2), S(2))},
    "tp and dp": {"q": (S(1), S(2), S(0)), "k": (S(1), R, S(0)), "o": (S(0), S(1), S(3)), "gate": (S(1), S(1), S(0)),
                  "down": (S(0), S(0), S(1)), "experts": (S(0), S(2), S(1))},
    "replicated": dict.fromkeys(MATRICES, (R, R, R)),
    "mixed": {"q": (R, S(0), S(1)), "k": (S(1), R, R), "o": (R, R, S(3)), "gate": (R, S(0), S(0)),
              "down": (S(1), R, S(1)), "experts": (S(0), R, R)},
}  # fmt: skip


def placements(layout):
    return {"layers": {i: dict(LAYOUTS[layout]) for i in range(2)}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_equals_one_device(layout):
    params, gradients = values(BLOCKS, 0), [values(BLOCKS, i) for i in range(1, 3)]
    optimizer = muon(0.1, spec=BLOCKS)
    want, state = ours(optimizer, params, gradients)
    with simulate(8):
        mesh = simulated_mesh(2, 2, 2)
        p = placed(params, mesh, placements(layout))
        s = optimizer.init(p)
        for donate, grads in zip((False, True), gradients, strict=True):
            before = cloned(p)
            q, _, s = optimizer.update(p, placed(grads, mesh, placements(layout)), s, donate=donate)
            if not donate:
                same_on_ranks(p, before)
            p = q
        same_on_ranks(p, placed(want, mesh, placements(layout)), 1e-12)
        same_on_ranks(s["momentum"], placed(state["momentum"], mesh, placements(layout)), 1e-12)


def test_leaves_of_one_shape_with_other_sides():
    """Their shards look alike, their matrices do not."""
    spec = {"a": Param((4, 8, 16), "expert embed mlp"), "b": Param((4, 8, 16), "embed kv head")}
    params, grads = values(spec, 0), values(spec, 1)
    optimizer = muon(0.1, spec=spec)
    want, _ = ours(optimizer, params, [grads])
    with simulate(8):
        mesh, by = simulated_mesh(2, 2, 2), {"a": (S(1), R, R), "b": (S(0), R, R)}
        p = placed(params, mesh, by)
        got, _, _ = optimizer.update(p, placed(grads, mesh, by), optimizer.init(p))
        same_on_ranks(got, placed(want, mesh, by), 1e-12)


@pytest.mark.parametrize("by", [(S(0), S(1), S(0)), (S(1), R, S(1)), (R, S(0), S(0)), (R, R, R)])
def test_the_exchange_makes_whole_matrices(by):
    """In order, though no permutation of rows or columns would change the orthogonal factor."""
    whole = torch.randn(16, 8, 8)
    with simulate(8):
        mesh = simulated_mesh(2, 2, 2)
        shards = [placed({"x": x}, mesh, {"x": by})["x"] for x in whole]
        found = exchange_of(shards[0], (0, 1), 0)
        stack = lift(torch.stack([x.to_local() for x in shards]), 8)
        mine = found.gather(stack)
        pairs = zip(per_rank(found.scatter(mine, 16)), per_rank(stack), strict=True)
        assert all(torch.equal(got, given) for got, given in pairs)
        held = torch.cat(per_rank(mine))
    places = [next(i for i, w in enumerate(whole) if torch.equal(x, w)) for x in held]
    assert sorted(places) == list(range(16))


def collectives_of(layers, layout, monkeypatch, piece=1 << 24):
    """(collectives by kind, elements that the iteration had on one rank)."""
    from torch.distributed import _functional_collectives as functional

    from fmegatron.optim import exchange

    calls, worked = Counter(), []
    to_all, gather = functional.all_to_all_single, exchange.gather_single
    module = sys.modules["fmegatron.optim.muon"]  # the package has the function under this name
    monkeypatch.setattr(apply, "PIECE", piece)
    monkeypatch.setattr(functional, "all_to_all_single", lambda *a: calls.update(["all-to-all"]) or to_all(*a))
    monkeypatch.setattr(exchange, "gather_single", lambda *a: calls.update(["all-gather"]) or gather(*a))
    monkeypatch.setattr(module, "newton_schulz", lambda x, **k: worked.append(len(x)) or newton_schulz(x, **k))
    spec = {"layers": {i: {"gate": Param((8, 16), "embed mlp")} for i in range(layers)}}
    by = {"layers": {i: {"gate": layout} for i in range(layers)}}
    with simulate(8):
        mesh = simulated_mesh(2, 2, 2)
        p = placed(values(spec, 0), mesh, by)
        optimizer = muon(0.1, spec=spec)
        optimizer.update(p, p, optimizer.init(p))
    return dict(calls), worked


@pytest.mark.parametrize(
    ("layout", "calls", "worked"),
    [
        ((S(0), S(0), S(0)), {"all-to-all": 6}, [2]),  # there and back on three mesh dims
        ((S(1), R, S(0)), {"all-to-all": 4, "all-gather": 1}, [2]),  # the replicas share the work too
        ((R, R, R), {"all-gather": 3}, [2]),
    ],
)
def test_ranks_share_the_work(layout, calls, worked, monkeypatch):
    """16 matrices on 8 ranks: each has two, whatever the layout, by a fixed number of collectives."""
    assert collectives_of(16, layout, monkeypatch) == (calls, worked)


def test_a_lone_matrix_is_not_shared_out(monkeypatch):
    assert collectives_of(1, (R, R, R), monkeypatch) == ({}, [1])
    assert collectives_of(3, (S(0), S(0), S(0)), monkeypatch) == ({"all-to-all": 6}, [1])


def test_batches_are_bounded(monkeypatch):
    """At most PIECE elements of whole matrices a rank, or one matrix."""
    calls, worked = collectives_of(16, (S(0), S(0), S(0)), monkeypatch, piece=1)
    assert worked == [1, 1] and calls == {"all-to-all": 12}


# Donation, torch.func, precision


@pytest.mark.parametrize("piece", [1 << 24, 1])
@pytest.mark.parametrize("moments", [None, torch.bfloat16])
def test_donation_changes_nothing_but_the_buffers(piece, moments, monkeypatch):
    monkeypatch.setattr(apply, "PIECE", piece)
    params, grads = values(BLOCKS, 0, torch.float32), values(BLOCKS, 1, torch.float32)
    params["layers"][0]["gate"] = params["layers"][0]["gate"].bfloat16()
    grads["layers"][0]["down"] = None
    grads["layers"][0]["o"] = grads["layers"][0]["o"].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    optimizer = muon(0.1, spec=BLOCKS, moments=moments)
    _, _, state = optimizer.update(params, grads, optimizer.init(params))
    assert state["momentum"]["layers"][0]["q"].dtype == (moments or torch.float32)
    kept = cloned((params, grads, state))
    first = optimizer.update(params, grads, state)
    same((params, grads, state), kept)
    assert torch.equal(first[0]["layers"][0]["down"], params["layers"][0]["down"])
    given = {id(x) for x in tree.leaves((params, grads, state)) if isinstance(x, torch.Tensor)}
    donated = optimizer.update(params, grads, state, donate=True)
    same(donated, first)
    assert all(id(x) in given for x in tree.leaves(donated) if isinstance(x, torch.Tensor))


def test_temporaries_are_a_batch(monkeypatch):
    monkeypatch.setattr(apply, "PIECE", 128)
    spec = {"layers": {i: {"gate": Param((8, 16), "embed mlp")} for i in range(20)}}
    params, grads = values(spec, 0), values(spec, 1)
    optimizer = muon(0.1, spec=spec)
    state = optimizer.init(params)
    with Count() as count:
        optimizer.update(params, grads, state, donate=True)
    assert count.largest <= 128


def test_an_ensemble_by_vmap():
    optimizer = muon(0.1, spec=BLOCKS["layers"][0])
    members = [values(BLOCKS["layers"][0], i) for i in range(3)]
    rows = [tree.leaves(m) for m in members]

    def twice(*flat):
        p = tree.like(members[0], flat)
        state = optimizer.init(p)
        for _ in range(2):
            p, _, state = optimizer.update(p, tree.tree_map(lambda x: x.sin(), p), state)
        return tuple(tree.leaves(p))

    got = torch.func.vmap(twice)(*[torch.stack(column) for column in zip(*rows, strict=True)])
    for i, row in enumerate(rows):
        for x, want in zip(got, twice(*row), strict=True):
            torch.testing.assert_close(x[i], want, rtol=1e-10, atol=1e-10)


def test_plain_operations_are_the_same(monkeypatch):
    params, grads = values(BLOCKS, 0), values(BLOCKS, 1)
    optimizer = muon(0.1, spec=BLOCKS)
    want = optimizer.update(params, grads, optimizer.init(params))
    monkeypatch.setattr(leaves, "plain_only", lambda: True)
    close(optimizer.update(params, grads, optimizer.init(params))[0], want[0], 1e-12)


# With AdamW for the rest


def test_labels():
    labels = muon_labels(SPEC)
    assert {n for n, label in tree.named(labels).items() if label == "muon"} == set(tree.paths(BLOCKS))
    assert labels["embed"] == labels["layers"][0]["norm"] == labels["layers"][1]["k_bias"] == "adamw"
    assert muon_labels(SPEC, others="rest")["embed"] == "rest"


@pytest.mark.parametrize("donate", [False, True])
def test_partition(donate):
    """Each leaf goes as it would alone with its optimizer; the state has each leaf under its own path."""
    params, gradients = values(SPEC, 0), [values(SPEC, i) for i in range(1, 4)]
    labels = muon_labels(SPEC)
    both = partition(labels, {"muon": muon(0.1, spec=SPEC), "adamw": adamw(0.01)})
    optimizer = chain(clip_by_global_norm(1.0), both)
    got, state = ours(optimizer, params, gradients, donate)
    picked = {"muon": {}, "adamw": {}}
    for path, label in tree.named(labels).items():
        picked[label][path] = path
    clip = lambda g: clip_by_global_norm(1.0).update(None, g, {})[1]  # noqa: E731
    alone = {"muon": muon(0.1, spec={n: p for n, p in tree.named(SPEC).items()}), "adamw": adamw(0.01)}
    for label, paths in picked.items():
        only = lambda t, paths=paths: {n: tree.named(t)[n] for n in paths}  # noqa: E731
        want, inner = ours(alone[label], only(params), [only(clip(g)) for g in gradients])
        for n in paths:
            torch.testing.assert_close(tree.named(got)[n], want[n], rtol=1e-12, atol=1e-12)
        held = {
            n
            for n, x in tree.named(state["partition"][label]["momentum" if label == "muon" else "m"]).items()
            if x is not None
        }
        assert held == set(paths)
        assert state["partition"][label]["count"] == inner["count"] == 3
    assert optimizer.rate == 0.1


def test_partition_on_a_mesh():
    spec = {"layers": {0: SPEC["layers"][0]}, "embed": SPEC["embed"]}
    by = {
        "layers": {0: {**LAYOUTS["tp and dp"], "norm": (R, R, S(0)), "k_bias": (S(0), R, R)}},
        "embed": (S(0), S(0), S(1)),
    }
    params, grads = values(spec, 0), values(spec, 1)
    optimizer = chain(
        clip_by_global_norm(1.0),
        partition(muon_labels(spec), {"muon": muon(0.1, spec=spec), "adamw": adamw(0.01)}),
    )
    want, _ = ours(optimizer, params, [grads])
    with simulate(8):
        mesh = simulated_mesh(2, 2, 2)
        p = placed(params, mesh, by)
        got, _, _ = optimizer.update(p, placed(grads, mesh, by), optimizer.init(p), donate=True)
        same_on_ranks(got, placed(want, mesh, by), 1e-12)
        assert all(isinstance(x, DTensor) for x in tree.leaves(got))


# Errors


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: muon(-0.1), ("lr=-0.1",)),
        (lambda: muon(0.1, momentum=1.0), ("momentum=1.0",)),
        (lambda: muon(0.1, adjust_lr="rms"), ("'rms'", "match_rms_adamw")),
        (lambda: muon(0.1, coefficients=(1.0, 2.0)), ("(1.0, 2.0)",)),
        (lambda: muon(0.1, matrices={"a": "embed -> mlp"}), ("spec=",)),
        (lambda: muon(0.1, spec=SPEC, matrices={"layer.*": "embed -> mlp"}), ("'layer.*'", "no leaf")),
        (lambda: muon(0.1, spec=SPEC, matrices={"*.q": "embed -> mlp"}), ("'embed -> mlp'", "layers.0.q")),
        (lambda: muon(0.1).init({"a": torch.ones(3)}), ("a of shape (3,)", "partition")),
        (lambda: muon(0.1, spec=SPEC).init(values(SPEC, 0)), ("layers.0.k_bias", "matrices=", "partition")),
        (lambda: partition({"a": "x"}, {"y": adamw(0.1)}).init({"a": torch.ones(2)}), ("'x' of a", "'y'")),
        (lambda: partition({"a": "x"}, {"x": adamw(0.1)}).init({"b": torch.ones(2)}), ("labels",)),
        (lambda: partition({"a": "x"}, {}), ("optimizers by label",)),
    ],
)
def test_errors(make, parts):
    with pytest.raises(UserError) as error:
        make()
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("at", [(S(0), S(0), R), (S(1), R, S(1)), (S(0), S(1), S(0))], ids=str)
def test_shards_of_unequal_size(at):
    """Rows 6 over 4 ranks and columns 9 over 2 or 4: as one device."""
    start, grads = {"a": torch.randn(6, 9, dtype=torch.float64)}, {"a": torch.randn(6, 9, dtype=torch.float64)}
    optimizer = muon(0.1)
    expected, _, _ = optimizer.update(start, grads, optimizer.init(start))
    with simulate(8):
        mesh = simulated_mesh(2, 2, 2)
        p, g = placed(start, mesh, {"a": at}), placed(grads, mesh, {"a": at})
        found, _, _ = optimizer.update(p, g, optimizer.init(p))
        for whole in per_rank(found["a"].full_tensor()):
            torch.testing.assert_close(whole, expected["a"], rtol=0, atol=1e-13)


def test_uneven_numbers_of_matrices_are_refused():
    with simulate(8):
        p = placed({"a": torch.randn(3, 4, 4)}, simulated_mesh(2, 2, 2), {"a": (S(0), R, R)})
        with pytest.raises(UserError, match="does not divide"):
            exchange_of(p["a"], (0, 1, 2), counts=1)


# On a GPU


@pytest.mark.gpu
@needs_cuda
@needs_muon
def test_cuda_equal_to_torch():
    params = made(0, shapes=SHAPES, device="cuda")
    gradients = [made(i, shapes=SHAPES, device="cuda") for i in range(1, 6)]
    held = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    peer = torch.optim.Muon(held, lr=0.1)
    for grads in gradients:
        for p, g in zip(held, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        peer.step()
    got, _ = ours(muon(0.1, inputs_first=False), params, gradients, donate=True)
    close(got, tree.like(params, [p.detach() for p in held]), 1e-2)
