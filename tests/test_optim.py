"""Optimizers against torch.optim and torch.nn.utils, and the global norm against the float64 norm of whole tensors."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim import (
    Optimizer,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    decay_mask,
    global_norm,
    leaves,
    lion,
    sgd,
    with_master,
)
from fmegatron.optim import apply as kernels
from fmegatron.schedules import cosine
from fmegatron.simulation import is_local, lift, per_rank, simulate
from tests.optim_trees import Count, cloned, close, made, ours, placed, same, same_on_ranks, simulated_mesh


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def matrices(params):
    return tree.tree_map(lambda p: p is not None and p.ndim >= 2, params)


def theirs(make, params, gradients, rate=None, max_norm=None):
    """The parameters after torch's optimizer: decay on matrices only, by two parameter groups."""
    leaves = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    decayed = [p for p in leaves if p.ndim >= 2]
    other = [p for p in leaves if p.ndim < 2]
    optimizer = make([{"params": decayed}, {"params": other, "weight_decay": 0.0}])
    for step, grads in enumerate(gradients):
        for p, g in zip(leaves, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(leaves, max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step) if rate else group["lr"]
        optimizer.step()
    return tree.like(params, [p.detach() for p in leaves])


ADAM = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
PAIRS = {
    "adamw": (
        lambda: adamw(0.02, mask=matrices, **ADAM),
        lambda groups, **o: torch.optim.AdamW(groups, lr=0.02, **ADAM, **o),
    ),
    "adam": (
        lambda: adam(0.02, mask=matrices, **ADAM),
        lambda groups, **o: torch.optim.Adam(groups, lr=0.02, **ADAM, **o),
    ),
    "sgd": (
        lambda: sgd(0.02, weight_decay=0.3, mask=matrices),
        lambda groups, **o: torch.optim.SGD(groups, lr=0.02, weight_decay=0.3, **o),
    ),
    "momentum": (
        lambda: sgd(0.02, momentum=0.9, weight_decay=0.3, mask=matrices),
        lambda groups, **o: torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.3, **o),
    ),
    "nesterov": (
        lambda: sgd(0.02, momentum=0.9, nesterov=True, weight_decay=0.3, mask=matrices),
        lambda groups, **o: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.3, **o),
    ),
}
each_pair = pytest.mark.parametrize(("our", "their"), PAIRS.values(), ids=PAIRS)
each_our = pytest.mark.parametrize("our", [our for our, _ in PAIRS.values()], ids=PAIRS)


# Against torch


@each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_torch(our, their, dtype):
    params, gradients = made(0, dtype), [made(i, dtype) for i in range(1, 7)]
    got, state = ours(our(), params, gradients)
    same(got, theirs(lambda g: their(g, fused=True), params, gradients))
    close(got, theirs(lambda g: their(g, foreach=False), params, gradients), 1e-14 if dtype == torch.float64 else 3e-6)
    assert state["count"] == 6


@each_pair
def test_bfloat16_equal_to_torch(our, their):
    """With everything in bfloat16 the kernel computes in float32 and rounds, as torch's does."""
    params, gradients = made(0, torch.bfloat16), [made(i, torch.bfloat16) for i in range(1, 4)]
    optimizer = our()
    state = optimizer.init(params)
    state = {k: tree.tree_map(lambda x: x.bfloat16(), v) if k != "count" else v for k, v in state.items()}
    got = cloned(params)
    for grads in gradients:
        got, _, state = optimizer.update(got, grads, state)
    if optimizer.name != "sgd":
        same(got, theirs(lambda g: their(g, fused=True), params, gradients))
        return
    # torch's fused kernel of SGD is wrong there (it reads what it has not written), so that ours runs it in float32
    wide = [tree.tree_map(lambda x: x.float(), t) for t in (params, *gradients)]
    want = theirs(lambda g: their(g, foreach=False), wide[0], wide[1:])
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert (a.float() - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lion_with_all_in_half_precision_rounds_once(dtype):
    """A step equals one in float32, rounded: parameters and moments."""
    optimizer, (params, grads, m) = lion(0.02, weight_decay=0.3), (made(i, dtype) for i in range(3))
    state = {"count": 0, "m": m}
    wide = [tree.tree_map(lambda x: x.float(), t) for t in (params, grads, m)]
    got, _, state = optimizer.update(params, grads, state)
    want, _, exact = optimizer.update(wide[0], wide[1], {"count": 0, "m": wide[2]})
    for found, one in ((got, want), (state["m"], exact["m"])):
        same(found, tree.tree_map(lambda x: x.to(dtype), one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("donate", [False, True])
def test_lion_equals_the_paper(dtype, donate):
    """Algorithm 2 of Chen et al. in float64; a sign that rounding turns would show as a difference of 2 lr."""
    params, gradients = made(0, dtype), [made(i, dtype) for i in range(1, 7)]
    got, state = ours(lion(0.02, betas=(0.8, 0.95), weight_decay=0.3, mask=matrices), params, gradients, donate)
    p, m = tree.tree_map(lambda x: x.double(), params), tree.tree_map(lambda x: torch.zeros_like(x).double(), params)
    for grads in gradients:
        for w, g, e in zip(tree.leaves(p), tree.leaves(grads), tree.leaves(m), strict=True):
            update = torch.sign(0.8 * e + 0.2 * g.double())
            w -= 0.02 * (update + (0.3 if w.ndim >= 2 else 0.0) * w)
            e.copy_(0.95 * e + 0.05 * g.double())
    close(got, tree.tree_map(lambda x: x.to(dtype), p), 1e-12 if dtype == torch.float64 else 1e-6)
    close(state["m"], tree.tree_map(lambda x: x.to(dtype), m), 1e-12 if dtype == torch.float64 else 1e-6)


def test_clip_and_schedule_equal_to_torch():
    rate = cosine(0.1, total=6, warmup=2)
    params, gradients = made(0, torch.float64), [made(i, torch.float64) for i in range(1, 7)]
    for max_norm in (0.5, 1e3):
        optimizer = chain(clip_by_global_norm(max_norm), adamw(rate, mask=matrices, **ADAM))
        got, state = ours(optimizer, params, gradients)
        want = theirs(lambda g: torch.optim.AdamW(g, **ADAM), params, gradients, rate, max_norm)
        close(got, want, 1e-13)
        assert set(state) == {"clip", "adamw"} and optimizer.rate is rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("donate", [False, True])
def test_clip_equals_torch(dtype, donate):
    grads = made(3, dtype)
    leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in tree.leaves(grads)]
    for p, g in zip(leaves, tree.leaves(grads), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, 2.0)
    before = cloned(grads)
    _, got, _ = clip_by_global_norm(2.0).update(None, grads, {}, donate=donate)
    tight = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    close(got, tree.like(grads, [p.grad for p in leaves]), tight)
    torch.testing.assert_close(global_norm(before).to(dtype), norm, rtol=tight, atol=0)
    if not donate:
        same(grads, before)
    # a norm that the caller has is used
    _, got, _ = clip_by_global_norm(2.0).update(None, before, {}, grad_norm=torch.tensor(4.0))
    close(got, tree.tree_map(lambda g: g * 0.5, before), 1e-6 if dtype != torch.bfloat16 else 1e-2)


# Purity, donation, kernels


def mixed(seed):
    """Leaves of three dtypes, one transposed, one without a gradient."""
    params = made(seed)
    params["half"], params["double"] = torch.randn(6, 4).bfloat16(), torch.randn(3, dtype=torch.float64)
    params["strided"], params["frozen"], params["none"] = torch.randn(4, 3).t(), torch.randn(2), None
    grads = tree.tree_map(lambda p: None if p is None else torch.randn_like(p), params)
    grads["frozen"] = None
    grads["layers"][0]["q"] = torch.randn(2, 3, 5).permute(2, 1, 0)
    return params, grads


OPTIMIZERS = {
    **{name: our for name, (our, _) in PAIRS.items()},
    "chain": lambda: chain(clip_by_global_norm(0.5), adamw(0.02)),
    "master": lambda: with_master(adamw(0.02)),
    "master64": lambda: with_master(chain(clip_by_global_norm(0.5), sgd(0.02, momentum=0.9)), torch.float64),
    "moments": lambda: adamw(0.02, moments=torch.bfloat16),
    "adam moments": lambda: adam(0.02, moments=(torch.bfloat16, torch.float32)),
    "lion": lambda: lion(0.02, weight_decay=0.3, mask=matrices),
    "lion moments": lambda: lion(0.02, moments=torch.bfloat16),
}
NARROW = ("moments", "adam moments", "lion moments")


def narrow(make):
    """Has it moments in bfloat16?"""
    return make in [OPTIMIZERS[name] for name in NARROW]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("piece", [1 << 24, 16])
def test_donation_changes_nothing_but_the_buffers(make, piece, monkeypatch):
    monkeypatch.setattr(kernels, "PIECE", piece)
    torch.manual_seed(0)
    optimizer = make()
    params, grads = mixed(0)
    state = optimizer.init(params)
    _, _, state = optimizer.update(params, grads, state)  # moments that are not zero
    kept = cloned((params, grads, state))
    first = optimizer.update(params, grads, state)
    same((params, grads, state), kept)  # pure
    same(optimizer.update(params, grads, state), first)  # and twice the same
    given = {id(x): x for x in tree.leaves((params, grads, state)) if isinstance(x, torch.Tensor)}
    donated = optimizer.update(params, grads, state, donate=True)
    same(donated, first)
    assert all(id(x) in given for x in tree.leaves(donated) if isinstance(x, torch.Tensor))
    assert torch.equal(donated[0]["frozen"], kept[0]["frozen"]) and donated[0]["none"] is None


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_odd_leaves_against_plain_mathematics(make, monkeypatch):
    """Dtypes and strides that no kernel takes, against the plain operations in float64, to the leaf's precision."""
    torch.manual_seed(0)
    optimizer = make()
    params, grads = mixed(0)
    got, _, _ = optimizer.update(params, grads, optimizer.init(params))
    wide = lambda t: tree.tree_map(lambda x: None if x is None else x.double().contiguous(), t)  # noqa: E731
    monkeypatch.setattr(leaves, "plain_only", lambda: True)
    want, _, _ = optimizer.update(wide(params), wide(grads), optimizer.init(wide(params)))
    for path, x in tree.named(got).items():
        if x is not None:
            eps = torch.finfo(x.dtype).eps if path == "double" else max(torch.finfo(x.dtype).eps, 1e-6)
            if narrow(make):
                eps = 1e-2
            torch.testing.assert_close(x.double(), tree.named(want)[path], rtol=4 * eps, atol=4 * eps)


def test_a_step_is_exact_where_a_kernel_reads_strides_wrongly():
    """torch._fused_adamw_ on CPU pairs elements by storage; a transposed gradient must not be."""
    p, g = torch.zeros(3, 4), torch.randn(4, 3).t()
    optimizer = adamw(0.1, eps=0.0, weight_decay=0.0)
    got, _, _ = optimizer.update({"p": p}, {"p": g}, optimizer.init({"p": p}))
    torch.testing.assert_close(got["p"], -0.1 * g.sign())


@pytest.mark.parametrize("name", ["adamw", "momentum", "chain", "master"])
def test_kernels_do_not_scale_with_leaves(name):
    def calls(n):
        optimizer = OPTIMIZERS[name]()
        shapes = {str(i): (4, 3) if i % 2 else (5,) for i in range(n)}
        params, grads = made(0, torch.bfloat16 if name == "master" else torch.float32, shapes), made(1, shapes=shapes)
        state = optimizer.init(params)
        with Count() as count:
            optimizer.update(params, grads, state, donate=True)
        return [c for c in count.calls if c != "aten.detach"]

    few, many = calls(4), calls(40)
    assert few == many
    assert len(calls(40)) < 30


@pytest.mark.parametrize("name", ["adamw", "momentum", "chain", "master", "moments", "lion", "lion moments"])
def test_donation_makes_no_temporaries(name, monkeypatch):
    monkeypatch.setattr(kernels, "PIECE", 64)
    optimizer = OPTIMIZERS[name]()
    params = {"a": torch.randn(40, 50), "b": torch.randn(1000).bfloat16()}
    grads = tree.tree_map(torch.randn_like, params)
    state = optimizer.init(params)
    with Count() as count:
        optimizer.update(params, grads, state, donate=True)
    assert count.largest <= 64


def test_leaves_are_converted_a_piece_at_a_time(monkeypatch):
    """However many small leaves there are, at most PIECE elements have a copy at once."""
    monkeypatch.setattr(kernels, "PIECE", 64)
    held, fused = [], torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda p, *a, **k: held.append([x.numel() for x in p]) or fused(p, *a, **k)
    )
    params = {str(i): torch.randn(20).bfloat16() for i in range(10)} | {"large": torch.randn(150).bfloat16()}
    optimizer = adamw(0.1)
    optimizer.update(params, params, optimizer.init(params))
    assert held == [[20, 20, 20]] * 3 + [[20], [64], [64], [22]]


# Master copies, moments, masks


def test_master_copies():
    """Parameters in bfloat16 follow float32 training of the master copies exactly, rounded."""
    params = made(0, torch.bfloat16)
    params["wide"] = torch.randn(3)
    gradients = [made(i) | {"wide": torch.randn(3)} for i in range(1, 6)]
    plain = adamw(1e-4)
    want, _ = ours(plain, tree.tree_map(lambda p: p.float(), params), gradients)
    for donate in (False, True):
        got, state = ours(with_master(adamw(1e-4)), params, gradients, donate)
        same(got, tree.tree_map(lambda w, p: w.to(p.dtype), want, params))
        assert state["master"]["wide"] is None and state["master"]["embed"].dtype == torch.float32
        assert set(state) == {"count", "m", "v", "master"}
    # without them, updates this small are lost
    lost, _ = ours(adamw(1e-5, weight_decay=0.0), {"p": torch.ones(4).bfloat16()}, [{"p": torch.ones(4)}] * 5)
    kept, state = ours(
        with_master(adamw(1e-5, weight_decay=0.0)), {"p": torch.ones(4).bfloat16()}, [{"p": torch.ones(4)}] * 5
    )
    assert torch.equal(lost["p"].float(), torch.ones(4)) and state["master"]["p"].max() < 1


def test_state_dtypes():
    params = {"a": torch.randn(2).bfloat16(), "b": torch.randn(2), "c": torch.randn(2).double(), "d": torch.arange(3)}
    state = adamw(0.1).init(params)
    assert [None if x is None else x.dtype for x in tree.leaves(state["m"])] == [
        torch.float32,
        torch.float32,
        torch.float64,
        None,
    ]
    assert adamw(0.1, moments=torch.bfloat16).init(params)["v"]["b"].dtype == torch.bfloat16
    pair = adam(0.1, moments=(torch.bfloat16, torch.float64)).init(params)
    assert pair["m"]["b"].dtype == torch.bfloat16 and pair["v"]["b"].dtype == torch.float64
    assert sgd(0.1).init(params) == {"count": 0}
    grads = {k: torch.ones(2, dtype=v.dtype) if v.is_floating_point() else None for k, v in params.items()}
    new, _, _ = adamw(0.1).update(params, grads, state)
    assert torch.equal(new["d"], torch.arange(3))


def test_decay_mask():
    leaf = lambda dims, decay=None: SimpleNamespace(dims=dims, decay=decay)  # noqa: E731
    spec = {
        "q": leaf("embed kv group head"),
        "norm": leaf("embed"),
        "q_norm": leaf("kv head", False),
        "bias": leaf("mlp", True),
    }
    assert decay_mask(spec) == {"q": True, "norm": False, "q_norm": False, "bias": True}
    # as a mask: decay alone moves what is masked
    params = {k: torch.ones(2) for k in spec}
    zero = tree.tree_map(torch.zeros_like, params)
    optimizer = adamw(0.1, weight_decay=0.5, mask=decay_mask(spec))
    new, _, _ = optimizer.update(params, zero, optimizer.init(params))
    for name, expected in decay_mask(spec).items():
        torch.testing.assert_close(new[name], torch.full((2,), 0.95 if expected else 1.0))


# torch.func


@pytest.mark.parametrize("name", [*PAIRS, "chain", "master", "lion"])
def test_an_ensemble_by_vmap(name):
    dtype = torch.bfloat16 if name == "master" else torch.float64
    members = [(made(i, dtype), made(i + 10, dtype)) for i in range(3)]
    optimizer = OPTIMIZERS[name]()
    flat, shape = tree.flatten((members[0][0], members[0][1], {}))

    def twice(*leaves):
        params, grads, _ = tree.unflatten(shape, leaves)
        state = optimizer.init(params)
        for _ in range(2):
            params, _, state = optimizer.update(params, grads, state)
        return tuple(tree.leaves(params))

    rows = [tree.leaves((*m, {})) for m in members]
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    got = torch.func.vmap(twice)(*stacked)
    for i, row in enumerate(rows):
        for x, want in zip(got, twice(*row), strict=True):
            torch.testing.assert_close(x[i], want, rtol=1e-12 if dtype == torch.float64 else 1e-2, atol=1e-12)


def test_an_ensemble_of_rates():
    p, g, rates = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0.1, 0.01, 0.0])

    def one(p, g, rate):
        optimizer = adamw(rate)
        return optimizer.update([p], [g], optimizer.init([p]))[0][0]

    got = torch.func.vmap(one)(p, g, rates)
    for i in range(3):
        torch.testing.assert_close(got[i], one(p[i], g[i], float(rates[i])))


def test_a_gradient_through_the_update():
    """Meta-learning: d loss(p - lr * g(p)) / d lr."""
    p = torch.tensor([2.0, -1.0])
    optimizer = sgd(1.0)

    def after(scale):
        new, _, _ = optimizer.update([p], [scale * p], optimizer.init([p]))
        return (new[0] ** 2).sum()

    torch.testing.assert_close(torch.func.grad(after)(torch.tensor(0.25)), -2 * 0.75 * (p**2).sum())


# Norms


def test_norm_of_many_elements():
    """torch's own float32 norm on CPU is off by 5e-4 here."""
    x = torch.rand(1 << 24)
    want = x.double().norm()
    assert abs(global_norm({"x": x}).item() / want.item() - 1) < 1e-6
    assert abs(global_norm({"x": x.view(1 << 12, 1 << 12).t()}).item() / want.item() - 1) < 1e-6


def test_norm_of_odd_trees():
    assert global_norm({"a": None, "b": {}}).item() == 0
    tr = {"a": torch.tensor([3.0]), "b": None, "c": torch.arange(9), "d": torch.tensor([[4.0]]).bfloat16()}
    assert global_norm(tr).item() == 5 and global_norm(tr).dtype == torch.float32
    assert global_norm({"a": torch.ones(4).double(), "b": torch.ones(12)}).dtype == torch.float64
    params = made(0, torch.bfloat16)
    want = torch.cat([x.double().flatten() for x in tree.leaves(params)]).norm().item()
    assert global_norm(params).item() == pytest.approx(want, rel=1e-6)
    assert global_norm({"x": torch.full((300,), 1000.0).half()}).item() == pytest.approx(1000 * 300**0.5)


def test_norm_under_vmap():
    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(lambda t: global_norm([t, None]))(x), x.norm(dim=1))


# On a GPU

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_cuda
@each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_equal_to_torch(our, their, dtype):
    params, gradients = made(0, dtype, device="cuda"), [made(i, dtype, device="cuda") for i in range(1, 7)]
    got, _ = ours(our(), params, gradients)
    want = theirs(lambda g: their(g, fused=True), params, gradients)
    if dtype == torch.float64:
        same(got, want)
    else:
        close(got, want, 1e-6)  # our own kernel rounds in another order


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_cuda_equals_cpu_and_donates(make):
    torch.manual_seed(0)
    optimizer = make()
    params, grads = mixed(0)
    want = optimizer.update(params, grads, optimizer.init(params))
    there = lambda t: tree.tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, t)  # noqa: E731
    params, grads = there(params), there(grads)
    state = optimizer.init(params)
    got = optimizer.update(params, grads, state)
    for path, x in tree.named(got[0]).items():
        if x is not None:
            rtol = max(4 * torch.finfo(x.dtype).eps, 1e-5)
            torch.testing.assert_close(x.cpu(), tree.named(want[0])[path], rtol=rtol, atol=rtol)
    same(optimizer.update(params, grads, state, donate=True), got)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["adamw", "momentum", "chain", "master"])
def test_cuda_donation_takes_no_memory(name, monkeypatch):
    monkeypatch.setattr(kernels, "PIECE", 1 << 18)
    optimizer = OPTIMIZERS[name]()
    dtype = torch.bfloat16 if name == "master" else torch.float32
    params = {str(i): torch.randn(1024, 1024, device="cuda", dtype=dtype) for i in range(32)}
    grads = tree.tree_map(torch.randn_like, params)
    state = optimizer.init(params)
    params, grads, state = optimizer.update(params, grads, state, donate=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.update(params, grads, state, donate=True)
    assert torch.cuda.max_memory_allocated() - before < 4 << 20  # a tree in float32 is 128 MiB


# DTensors, simulated on four ranks

PLACEMENTS = {
    "embed": (Shard(0), Replicate()),
    "layers": {
        0: {"q": (Shard(1), Shard(0)), "norm": (Replicate(), Shard(0))},
        1: {"q": (Shard(0), Shard(0)), "norm": (Replicate(), Replicate())},
    },
    "scale": (Replicate(), Replicate()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norm_of_sharded_trees(dtype):
    values = made(0, dtype)
    want = torch.cat([x.double().flatten() for x in tree.leaves(values)]).norm().item()
    with simulate(4):
        norm = global_norm(placed(values, simulated_mesh(2, 2), PLACEMENTS))
        got = [x.item() for x in per_rank(lift(norm, 4))]
        assert not isinstance(norm, DTensor) and norm.shape == ()
    assert got == [got[0]] * 4
    assert got[0] == pytest.approx(want, rel=1e-14 if dtype == torch.float64 else 1e-6)


def test_norm_groups_its_collectives(monkeypatch):
    from torch.distributed import _functional_collectives as collectives

    calls = []
    original = collectives.all_reduce
    monkeypatch.setattr(collectives, "all_reduce", lambda *a, **k: calls.append(a[2][1]) or original(*a, **k))
    with simulate(4):
        global_norm(placed(made(0), simulated_mesh(2, 2), PLACEMENTS))
    assert calls == [0, 1]


def test_norm_refuses_a_partial_sum():
    with simulate(4):
        mesh = simulated_mesh(2, 2)
        x = DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()], run_check=False)
        with pytest.raises(UserError, match="Partial"):
            global_norm([x])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("donate", [False, True])
def test_sharded_updates(make, donate):
    dtype = torch.bfloat16 if make is OPTIMIZERS["master"] else torch.float64
    params, gradients = made(0, dtype), [made(i, dtype) for i in range(1, 4)]
    rtol = 1e-6 if dtype == torch.bfloat16 else 1e-2 if narrow(make) else 1e-14
    want, state = ours(make(), params, gradients)
    with simulate(4):
        mesh = simulated_mesh(2, 2)
        optimizer = make()
        p = placed(params, mesh, PLACEMENTS)
        s = optimizer.init(p)
        for x, y in zip(tree.leaves(s), tree.leaves(state), strict=True):
            assert isinstance(x, DTensor) == isinstance(y, torch.Tensor)
        for grads in gradients:
            g = placed(grads, mesh, PLACEMENTS)
            before = cloned(p)
            q, _, s = optimizer.update(p, g, s, donate=donate)
            if not donate:
                same_on_ranks(p, before)
            cut = [(x, y) for x, y in zip(tree.leaves(p), tree.leaves(q), strict=True) if is_local(x.to_local())]
            assert cut and all((x is y) == donate for x, y in cut)  # a plain tensor is lifted first
            p = q
        same_on_ranks(p, placed(want, mesh, PLACEMENTS), rtol)
        for key in ("m", "v", "momentum", "master"):
            if key in state and state[key]["scale"] is not None:
                same_on_ranks(s[key], placed(state[key], mesh, PLACEMENTS), rtol)


def test_placements_must_agree():
    with simulate(4):
        mesh = simulated_mesh(2, 2)
        p, g = placed({"a": torch.ones(4)}, mesh, {"a": (Shard(0), Replicate())}), {}
        g = placed({"a": torch.ones(4)}, mesh, {"a": (Replicate(), Replicate())})
        optimizer = adamw(0.1)
        with pytest.raises(UserError, match="grads of a must have"):
            optimizer.update(p, g, optimizer.init(p))


# Errors


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: adamw(-1.0), "lr=-1.0"),
        (lambda: adamw(0.1, betas=(0.9, 1.0)), "betas=(0.9, 1.0)"),
        (lambda: adamw(0.1, eps=-1e-8), "eps=-1e-08"),
        (lambda: adamw(0.1, weight_decay=float("nan")), "weight_decay=nan"),
        (lambda: sgd(0.1, nesterov=True), "momentum"),
        (lambda: sgd(0.1, momentum=-0.1), "momentum=-0.1"),
        (lambda: adam(0.1, weight_decay={"a": 0.1, "b": -0.5}), "weight_decay=-0.5 for b"),
        (lambda: adam(0.1, lr_scale=-2.0), "lr_scale=-2.0"),
        (lambda: adam(0.1, moments=torch.int32), "torch.int32"),
        (lambda: lion(0.1, betas=(1.0, 0.9)), "betas=(1.0, 0.9)"),
        (lambda: lion(0.1, moments=(torch.float32, torch.float32)), "one moment"),
        (lambda: clip_by_global_norm(0.0), "max_norm=0.0"),
        (lambda: chain(), "at least one"),
    ],
)
def test_errors(make, part):
    with pytest.raises(UserError) as error:
        make()
    assert part in str(error.value)


def test_other_trees_are_refused():
    optimizer = adamw(0.1)
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = optimizer.init(params)
    with pytest.raises(UserError, match="grads must be a tree like params"):
        optimizer.update(params, {"a": torch.ones(2)}, state)
    with pytest.raises(UserError, match="grads of b must have"):
        optimizer.update(params, {"a": torch.ones(2), "b": torch.ones(3)}, state)
    with pytest.raises(UserError, match="mask must be a tree"):
        adamw(0.1, mask={"a": True}).update(params, params, state)


def test_a_users_piece_in_a_chain():
    def update(params, grads, state, *, donate=False, grad_norm=None):
        return params, tree.tree_map(torch.sign, grads), {"seen": state["seen"] + 1}

    signs = Optimizer(lambda params: {"seen": 0}, update)
    optimizer = chain(signs, sgd(1.0), sgd(1.0))
    params = {"a": torch.zeros(2)}
    state = optimizer.init(params)
    new, grads, state = optimizer.update(params, {"a": torch.tensor([5.0, -0.5])}, state)
    assert new["a"].tolist() == [-2.0, 2.0]
    assert state == {"0": {"seen": 1}, "sgd1": {"count": 1}, "sgd2": {"count": 1}}
    assert copy.copy(optimizer).rate == 1.0
