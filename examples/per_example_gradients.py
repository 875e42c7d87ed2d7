"""Per-example gradients of a language model, and their clipping as in DP-SGD (Abadi et al. 2016).

A loss is a pure function of the parameters, so the gradient of every example by itself is `vmap` of `grad`, through
attention and the fused loss alike. What it shows, in float64: their mean is the gradient of the batch, each is the
gradient of its example alone, and no example moves the clipped sum by more than the bound.

    python per_example_gradients.py
"""

import torch

import fmegatron as fm
from fmegatron.primitives import attention, embedding, linear_cross_entropy, rms_norm, rotary, swiglu

VOCAB, EMBED, HEADS, HEAD, MLP, LAYERS, ROWS, SEQ = 32, 16, 2, 8, 32, 2, 8, 12
CLIP, NOISE, LEARNING_RATE = 7.0, 0.02, 0.05
DOUBLE = fm.Sharding(precision=fm.Precision(params=torch.float64))


def spec():
    layer = {
        "norm": fm.Param((EMBED,), "embed", fm.ones()),
        "qkv": fm.Param((EMBED, 3, HEADS, HEAD), "embed three heads head", fm.normal(0.2)),
        "out": fm.Param((HEADS, HEAD, EMBED), "heads head embed", fm.normal(0.2)),
        "mlp_norm": fm.Param((EMBED,), "embed", fm.ones()),
        "gate_up": fm.Param((EMBED, 2, MLP), "embed two mlp", fm.normal(0.2)),
        "down": fm.Param((MLP, EMBED), "mlp embed", fm.normal(0.2)),
    }
    table = fm.Param((VOCAB, EMBED), "vocab embed", fm.normal(0.5))
    return {"embed": table, "layers": dict.fromkeys(range(LAYERS), layer), "head": table}


def loss(params, tokens):
    """The mean loss of the next token, tokens[batch seq+1] -> scalar: plain PyTorch and this library's primitives."""
    x, positions = embedding(params["embed"], tokens[:, :-1]), torch.arange(tokens.shape[1] - 1)
    for p in params["layers"].values():
        q, k, v = torch.einsum("bse,etnh->tbsnh", rms_norm(x, p["norm"]), p["qkv"])
        q, k = (rotary(t, positions) for t in (q, k))
        x = x + torch.einsum("bsnh,nhe->bse", attention(q[..., None, :], k, v)[..., 0, :], p["out"])
        gate, up = torch.einsum("bse,etm->tbsm", rms_norm(x, p["mlp_norm"]), p["gate_up"])
        x = x + swiglu(gate, up) @ p["down"]
    return linear_cross_entropy(x, params["head"].T, tokens[:, 1:]).mean()


per_example = torch.func.vmap(torch.func.grad(lambda params, row: loss(params, row[None])), (None, 0))


def norms_of(grads):
    """The norm of each example's gradient, over all leaves: grads of [example …] -> [example]."""
    return sum(g.flatten(1).square().sum(1) for g in fm.tree.leaves(grads)).sqrt()


def clipped_sum(grads):
    """Every example's gradient cut to the norm CLIP, then summed."""
    factor = (CLIP / norms_of(grads)).clamp(max=1)
    return fm.tree.tree_map(lambda g: torch.einsum("n,n...->...", factor, g), grads)


def private_gradient(params, tokens, key):
    """What DP-SGD hands to the optimizer: the clipped sum and normal noise, divided by the number of examples. (What
    privacy that gives is for an accountant of yours.)"""

    def noise(path, g):
        return fm.random.normal(fm.fold_in(key, path), g.shape, std=NOISE * CLIP, dtype=g.dtype)

    total = clipped_sum(per_example(params, tokens))
    return fm.tree.like(total, [(g + noise(path, g)) / ROWS for path, g in fm.tree.named(total).items()])


def largest_difference(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(fm.tree.leaves(a), fm.tree.leaves(b), strict=True))


if __name__ == "__main__":
    params = fm.init(spec(), fm.key(0), sh=DOUBLE)
    tokens = fm.random.randint(fm.key(1), (ROWS, SEQ + 1), 0, VOCAB).cumsum(1) % VOCAB
    each = per_example(params, tokens)
    norms = norms_of(each)
    print("norms of the examples' gradients:", " ".join(f"{n:.2f}" for n in norms.tolist()))

    value, batch = fm.value_and_grad(loss)(params, tokens)
    error = largest_difference(fm.tree.tree_map(lambda g: g.mean(0), each), batch)
    alone = [fm.value_and_grad(loss)(params, row[None])[1] for row in tokens]
    apart = max(largest_difference(fm.tree.tree_map(lambda g, i=i: g[i], each), alone[i]) for i in range(ROWS))
    print(f"their mean is the batch's gradient to {error:.0e}, each is its example's alone to {apart:.0e}")
    assert error < 1e-13 and apart < 1e-13

    for i in (int(norms.argmin()), int(norms.argmax())):  # one below the bound, one above
        without = clipped_sum(per_example(params, torch.cat([tokens[:i], tokens[i + 1 :]])))
        change = fm.optim.global_norm(fm.tree.tree_map(torch.sub, clipped_sum(each), without))
        print(f"the example of norm {norms[i]:.2f} moves the clipped sum by {change:.2f} (bound {CLIP})")
        assert abs(change - norms[i].clamp(max=CLIP)) < 1e-9
    assert norms.min() < CLIP < norms.max()

    optimizer, first = fm.optim.sgd(LEARNING_RATE), value
    state = optimizer.init(params)
    for step in range(20):
        grads = private_gradient(params, tokens, fm.fold_in(fm.key(2), step))
        params, _, state = optimizer.update(params, grads, state)
    last = loss(params, tokens)
    print(f"20 steps of DP-SGD: loss {first:.3f} -> {last:.3f}")
    assert last < first - 0.3
