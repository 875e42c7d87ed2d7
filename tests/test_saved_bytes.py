"""What a decoder keeps from forward to backward, to the byte, and what its backward runs again, by each `remat` policy.

A layer's bytes are a closed form of its sizes, written here and not read off the code; they are counted as storages
that live after the forward, as tensors that autograd saves, and as what the residuals hold.
"""

import collections
import dataclasses

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fmegatron.product
from fmegatron.context import Ctx
from fmegatron.models import PRESETS, Decoder, DecoderConfig, decoder
from fmegatron.precision import Precision
from fmegatron.primitives.attention import function as attention_function
from fmegatron.random import key
from fmegatron.remat import everything, names, nothing
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.tree import leaves, like, tensors

# no two sizes alike; those of the sequence and the vocabulary are primes that divide no other number of elements
B, S, V = 2, 23, 101
SIZES = dict(vocab=V, embed=20, layers=3, heads=6, kv_heads=2, head=8, mlp=28)
CONFIG = DecoderConfig(**SIZES)
L, D, F, HEADS = CONFIG.layers, CONFIG.embed, CONFIG.mlp, CONFIG.heads
Q, KV = CONFIG.heads * CONFIG.head, CONFIG.kv_heads * CONFIG.head

# Elements per token of each product's output.
PRODUCTS = {"q": Q, "k": KV, "v": KV, "o": D, "gate": F, "up": F, "down": D}
CONTRACTED = {"q": D, "k": D, "v": D, "o": Q, "gate": D, "up": D, "down": F}
POLICIES = {
    "everything": everything,
    "nothing": nothing,
    "attention": names("attention"),
    "products": names(*PRODUCTS),
    "inputs of attention": names("q", "k", "v"),
    "attention, up and gate": names("attention", "up", "gate"),
    "outputs": names("o", "down"),
    "predicate": lambda name: name in ("attention", "o"),
    "every name": lambda name: True,
    "unknown name": names("atention"),
}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def per_token(policy, size):
    """Bytes that a layer keeps for each token whose activations have `size` bytes an element; statistics are fp32."""
    stream = D * size
    attention = Q * size + HEADS * 4  # the output and its log-sum-exp
    if policy is everything:
        norm = D * size + 4  # the normed stream, and 1 / rms; the stream itself is the layer's or the sum in the middle
        turned = (Q + 2 * KV) * size  # queries, keys, values
        gated = 3 * F * size  # gate, up, and the input of down
        return 2 * stream + 2 * norm + turned + attention + gated
    kept = sum(n * size for name, n in PRODUCTS.items() if policy(name))
    return stream + kept + (attention if policy("attention") else 0)


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make(policy, precision=None, config=CONFIG, **options):
    """The model, its parameters, a batch and the context with that batch's positions."""
    model = Decoder(config, save=policy, **options)
    ctx = Ctx(Sharding(precision=precision or Precision()))
    params = init(model.spec(), key(0), sh=ctx.sh)
    params = like(params, [w.requires_grad_() for w in leaves(params)])
    tokens = torch.randint(V, (B, S))
    batch = dict(tokens=tokens, labels=tokens.roll(-1, 1))
    return model, params, batch, model.context(batch, ctx)


class Alive(TorchDispatchMode):
    """The storages made inside that still live."""

    def __init__(self):
        super().__init__()
        self.refs = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves
        old = {t.untyped_storage()._cdata for t in flat((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in flat(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in old:
                s = t.untyped_storage()
                self.refs[s._cdata] = StorageWeakRef(s), s.nbytes()
        return out

    def sizes(self):
        """Bytes of each; without those of single elements, which are the roots of graphs."""
        return [n for ref, n in self.refs.values() if n > 8 and not ref.expired()]


def check_sizes(sizes, element):
    """No tensor of queries times keys, none with an element per word."""
    for n in sizes:
        assert n % (S * S * element) and n % (V * element)


# what is kept


@policies
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_bytes_that_live_after_the_forward(policy, compute):
    """Of the layers alone. In bf16 they cast their parameters, which then are none of the residual's business."""
    model, params, batch, ctx = make(policy, Precision(compute=compute))
    x = model.embed(params, batch, ctx).detach().requires_grad_()
    with Alive() as alive:
        y = model._stack(params["layers"], x, ctx)
    assert y.requires_grad
    # the first layer's input was there before, the last one's output takes its place
    assert sum(alive.sizes()) == L * B * S * per_token(policy, compute.itemsize)
    check_sizes(alive.sizes(), compute.itemsize)
    torch.autograd.grad(y.sum(), [x, *leaves(params["layers"])])
    del y
    assert not alive.sizes()


@policies
def test_bytes_of_the_whole_model(policy):
    """Beside the layers: the last norm, the input of the loss, and one mask of ignored labels; no logits."""
    model, params, batch, _ = make(policy)
    with Alive() as alive:
        terms, _ = model.loss(params, batch)
    tables = 2 * S * CONFIG.head // 2 * 4  # the rotary table, in every layer's reach
    positions = 0 if policy is everything else S * 8  # in the context of a second run
    head = B * S * (D * 4 + 4 + D * 4)  # the stream, 1 / rms, the normed stream
    loss = B * S * (4 + 8 + 1)  # itself, the labels, and which of them are ignored
    assert sum(alive.sizes()) == L * B * S * per_token(policy, 4) + tables + positions + head + loss
    check_sizes(alive.sizes(), 4)
    assert terms["lm"].items.shape == (B, S)


def test_every_form_of_the_loss_keeps_no_logits():
    config = dataclasses.replace(PRESETS["gemma2-2b"], **SIZES)
    assert config.logit_softcap is not None
    sizes = []
    for options in ({}, dict(label_smoothing=0.1), dict(label_smoothing=0.1, z_loss=1e-4)):
        model, params, batch, _ = make(nothing, config=config, **options)
        with Alive() as alive:
            terms, _ = model.loss(params, batch)
        check_sizes(alive.sizes(), 4)
        sizes.append(sum(alive.sizes()))
        del terms
    assert sizes == [sizes[0], sizes[0], sizes[0] + B * S * 4]  # the z-loss is a square of lse


# What a layer of each family keeps beside a Llama's, in bytes a token in fp32.
FAMILIES = {
    "llama3-8b": 0,
    "phi3-mini": 0,
    "mistral-7b-v0.1": 0,
    "qwen2.5-7b": 0,  # biases keep nothing
    "gpt2": 2 * 4 - F * 4,  # a layer norm has two statistics; there is no gate
    "qwen3-8b": (Q + KV) * 4 + (HEADS + CONFIG.kv_heads) * 4,  # norms of each head of queries and keys
    "gemma2-2b": 2 * (D * 4 + 4),  # two more norms
    "gemma3-1b": 2 * (D * 4 + 4) + (Q + KV) * 4 + (HEADS + CONFIG.kv_heads) * 4,
    "olmo2-7b": (Q + KV) * 4 + 2 * 4,  # norms behind the parts instead of before; one each of all queries and keys
}


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_other_families(family):
    for policy in (everything, names("attention", "up")):
        config = dataclasses.replace(PRESETS[family], **SIZES)
        model, params, batch, ctx = make(policy, config=config)
        x = model.embed(params, batch, ctx).detach().requires_grad_()
        with Alive() as alive:
            y = model._stack(params["layers"], x, ctx)
        more = FAMILIES[family] if policy is everything else 0
        assert sum(alive.sizes()) == L * B * S * (per_token(policy, 4) + more)
        check_sizes(alive.sizes(), 4)
        del y


def test_what_autograd_saves_with_everything():
    model, params, batch, ctx = make(everything)
    kept = {}

    def pack(t):
        kept[t.untyped_storage()._cdata] = t
        return t

    x = model.embed(params, batch, ctx).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model._stack(params["layers"], x, ctx)
    given = {t.untyped_storage()._cdata for t in [*leaves(params), *ctx.extras["rotary full"]]}
    mine = [t for at, t in kept.items() if at not in given]
    sizes = [t.untyped_storage().nbytes() for t in mine]
    assert y.untyped_storage()._cdata not in kept
    assert sum(sizes) == L * B * S * per_token(everything, 4)
    check_sizes(sizes, 4)
    for t in mine:
        # (of a product, the rows are one dim)
        assert (tuple(t.shape[:2]) == (B, S) or t.shape[0] == B * S) and S not in t.shape[2:] and V not in t.shape
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.loss(params, batch)
    assert not [t for t in kept.values() if V in t.shape and t.shape != (V, D)]  # the tables themselves


def held(residual):
    """Every tensor inside a residual."""
    if dataclasses.is_dataclass(residual):
        return [t for f in dataclasses.fields(residual) for t in held(getattr(residual, f.name))]
    if hasattr(residual, "seen"):
        return [t for t, _ in residual.seen]
    return tensors(residual)[0]


def check_residual(residual, policy, ctx):
    """One residual a layer, and in them nothing else."""
    assert len(residual.residuals) == L and not residual.full
    shared = {t.untyped_storage()._cdata for t in tensors(ctx)[0]}
    found = {t.untyped_storage()._cdata: t for r in residual.residuals for t in held(r)}
    found = [t for at, t in found.items() if at not in shared]
    assert sum(t.untyped_storage().nbytes() for t in found) == L * B * S * per_token(policy, 2)
    assert all(tuple(t.shape[:2]) == (B, S) for t in found)  # activations; no parameter


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("name", [n for n in POLICIES if n != "everything"])
def test_what_residuals_hold(name, joint):
    """By the split of the layers, with the parameters cast."""
    policy = POLICIES[name]
    model, params, batch, ctx = make(policy, Precision(compute=torch.bfloat16))
    x = model.embed(params, batch, ctx).detach()
    _, residual = model._stack.split.forward(params["layers"], x, ctx, joint=joint)
    check_residual(residual, policy, ctx)


# what is run again


class Calls:
    """How often each computation of a block is made, by name: `computed["q"]`, …"""

    def __init__(self, monkeypatch):
        self.computed = collections.Counter()
        self.kernels = 0
        dot = Sharding.dot

        def kernel(f):
            def run(*args):
                self.kernels += 1
                return f(*args)

            return run

        def named(f, name=None):
            """f by its name, counted if a kernel runs inside."""

            def run(*args, **kwargs):
                before = self.kernels
                y = f(*args, **kwargs)
                self.computed[name or kwargs["name"]] += self.kernels - before
                return y

            return run

        def counted(f, name):
            def run(*args, **kwargs):
                self.computed[name] += 1
                return f(*args, **kwargs)

            return run

        for module, name in ((fmegatron.product, "matrix_product"), (attention_function, "attend")):
            monkeypatch.setattr(module, name, kernel(getattr(module, name)))
        monkeypatch.setattr(Sharding, "dot", named(dot))
        monkeypatch.setattr(decoder, "context_attention", named(decoder.context_attention, "attention"))
        for name in ("add_rms_norm", "apply_rotary_both"):
            monkeypatch.setattr(decoder, name, counted(getattr(decoder, name), name))
        monkeypatch.setitem(decoder.GATED, "swiglu", counted(decoder.GATED["swiglu"], "swiglu"))

    def since(self):
        """The counts since the last call, without zeros."""
        computed, self.computed = +self.computed, collections.Counter()
        return dict(computed)


NAMELESS = {"add_rms_norm": 2 * L, "apply_rotary_both": L, "swiglu": L}
NAMED = dict.fromkeys([*PRODUCTS, "attention"], L)


@policies
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_what_is_run_again_is_what_is_not_named(policy, compute, monkeypatch):
    model, params, batch, ctx = make(policy, Precision(compute=compute))
    x = model.embed(params, batch, ctx).detach().requires_grad_()
    calls = Calls(monkeypatch)
    y = model._stack(params["layers"], x, ctx)
    assert calls.since() == NAMED | NAMELESS
    torch.autograd.grad(y.sum(), [x, *leaves(params["layers"])])
    again = {} if policy is everything else NAMELESS | {n: c for n, c in NAMED.items() if not policy(n)}
    assert calls.since() == again


def operations(policy):
    """Of the products in a forward and in its backward: two for each of the forward, and those that are run again."""
    products = {n: 2 * L * B * S * PRODUCTS[n] * CONTRACTED[n] for n in PRODUCTS}
    again = 0 if policy is everything else sum(n for name, n in products.items() if not policy(name))
    return sum(products.values()), 2 * sum(products.values()) + again


@policies
def test_operations_of_the_backward(policy):
    """As torch counts them (those of attention, an operation of ours, it does not)."""
    model, params, batch, ctx = make(policy)
    x = model.embed(params, batch, ctx).detach().requires_grad_()
    with FlopCounterMode(display=False) as forward:
        y = model._stack(params["layers"], x, ctx)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(y.sum(), [x, *leaves(params["layers"])])
    assert (forward.get_total_flops(), backward.get_total_flops()) == operations(policy)


def test_compiled():
    """Residuals and operations of compiled blocks: those of the same blocks as written."""
    policy = POLICIES["attention, up and gate"]
    model, params, batch, ctx = make(policy, Precision(compute=torch.bfloat16), compile={"backend": "aot_eager"})
    x = model.embed(params, batch, ctx).detach()

    def forward():
        return model._stack.split.forward(params["layers"], x, ctx, joint=True)

    def backward(y, residual):
        model._stack.split.backward(residual, torch.ones_like(y), params["layers"])

    backward(*forward())  # compiles
    with torch.profiler.profile(with_flops=True) as first:
        y, residual = forward()
    check_residual(residual, policy, ctx)
    with torch.profiler.profile(with_flops=True) as second:
        backward(y, residual)
    found = first.events(), second.events()

    def inside(event, name):
        return event is not None and (event.name.startswith(name) or inside(event.cpu_parent, name))

    products = [
        sum(e.flops for e in events if e.name in ("aten::mm", "aten::bmm") and not inside(e, "fmegatron::"))
        for events in found
    ]
    assert tuple(products) == operations(policy)
    attention = [sum(e.name == "fmegatron::attention" for e in events) for events in found]
    assert attention == [L, 0]


@policies
def test_gradients_do_not_depend_on_the_policy(policy):
    model, params, batch, _ = make(policy)
    plain = Decoder(CONFIG)
    got, want = (
        torch.autograd.grad(m.loss(params, batch)[0]["lm"].items.sum(), leaves(params)) for m in (model, plain)
    )
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
