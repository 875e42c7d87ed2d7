"""Hessian-vector products and the sharpness of the loss on a sharded model, by power iteration.

The loss is differentiated twice, reverse over reverse, straight through the collectives of its equations: `sh.inner`
is the inner product of two trees of shards, and the gradient of <gradient, v> is the Hessian times v. The sharpness
(the Hessian's eigenvalue of largest size) on a mesh is that of one device, and that of the dense Hessian.

    python hessian_vector_product.py                                      # four simulated ranks, against one device
    torchrun --nproc-per-node 4 hessian_vector_product.py dp=2,tp=2       # real ones
"""

import contextlib
import os
import sys

import torch

import fmegatron as fm
from fmegatron.primitives import embedding, linear_cross_entropy, rms_norm, swiglu

VOCAB, EMBED, MLP, ROWS, SEQ = 8, 4, 8, 4, 8
FEW, MANY = 4, 30  # iterations: to compare layouts (a simulated one takes a second each), and to converge
RULES = fm.Rules({"batch": "dp", "seq": None, "seq*": "tp", "embed": None, "mlp": "tp", "vocab": "tp"}, store="dp")
DOUBLE = fm.Precision(params=torch.float64)
WEIGHT = {"init": fm.normal(0.5), "over": "batch seq"}
SPEC = {
    "embed": fm.Param((VOCAB, EMBED), "vocab embed", **WEIGHT),
    "norm": fm.Param((EMBED,), "embed", fm.ones(), over="batch seq*"),
    "gate": fm.Param((EMBED, MLP), "embed mlp", **WEIGHT),
    "up": fm.Param((EMBED, MLP), "embed mlp", **WEIGHT),
    "down": fm.Param((MLP, EMBED), "mlp embed", **WEIGHT),
    "head": fm.Param((VOCAB, EMBED), "vocab embed", **WEIGHT),
}


def loss(params, batch, sh):
    """The mean loss of a token over the global batch, of this rank's shards and rows."""
    p = sh.use(params, SPEC)
    x = embedding(p["embed"], batch["tokens"], sh=sh, vocab_size=VOCAB)
    h = sh(rms_norm(x, p["norm"]), "batch seq* embed -> batch seq embed | mlp")
    gate, up = (sh.dot(h, p[n], "batch seq embed, embed mlp -> batch seq mlp") for n in ("gate", "up"))
    x = x + sh.dot(swiglu(gate, up), p["down"], "batch seq mlp, mlp embed -> batch seq* embed")
    h = sh(x, "batch seq* embed -> batch seq embed | vocab")
    equation = "batch seq embed, vocab embed -> batch seq vocab"
    each = linear_cross_entropy(h, p["head"], batch["labels"], equation=equation, sh=sh, vocab_size=VOCAB)
    return sh.sum(each, "batch seq ->") / (ROWS * SEQ)


def hessian_vector_product(params, vector, batch, sh):
    """H v, a tree of shards like the parameters."""

    def along(p):
        return sh.inner(torch.func.grad(loss)(p, batch, sh), vector, SPEC)

    return torch.func.grad(along)(params)


def problem(sh):
    """(parameters, batch), as this rank holds them. torch.func takes local tensors, not DTensors: hence `sh.local`."""
    text = fm.random.randint(fm.key(2), (ROWS, SEQ + 1), 0, VOCAB).cumsum(1) % VOCAB
    batch = {"tokens": sh.shard(text[:, :-1], "batch seq"), "labels": sh.shard(text[:, 1:], "batch seq")}
    return sh.local(fm.init(SPEC, fm.key(0), sh=sh)), batch


def sharpness(sh, iterations):
    """The eigenvalue that power iteration from a random vector finds."""
    params, batch = problem(sh)
    product = sh.local(fm.init(SPEC, fm.key(1), sh=sh))
    for _ in range(iterations):
        norm = sh.inner(product, product, SPEC).sqrt()
        vector = fm.tree.tree_map(lambda x, norm=norm: x / norm, product)
        product = hessian_vector_product(params, vector, batch, sh)
    return float(fm.simulation.per_rank(sh.inner(vector, product, SPEC))[0])  # (equal on all ranks)


def dense_eigenvalues():
    """All eigenvalues of the Hessian as one matrix, on one device."""
    sh = fm.Sharding(precision=DOUBLE)
    params, batch = problem(sh)
    sizes = [x.numel() for x in fm.tree.leaves(params)]

    def of_one_vector(flat):
        parts = zip(flat.split(sizes), fm.tree.leaves(params), strict=True)
        return loss(fm.tree.like(params, [part.view_as(x) for part, x in parts]), batch, sh)

    flat = torch.cat([x.flatten() for x in fm.tree.leaves(params)])
    return torch.linalg.eigvalsh(torch.func.jacrev(torch.func.grad(of_one_vector))(flat))


if __name__ == "__main__":
    real = "WORLD_SIZE" in os.environ  # under torchrun
    one = fm.Sharding(precision=DOUBLE)
    alone = sharpness(one, FEW)
    fm.join_processes()
    with contextlib.nullcontext() if real else fm.simulate(4):
        mesh = fm.make_mesh(sys.argv[1] if len(sys.argv) > 1 else "dp=2,tp=2", device="cpu")
        sharded = sharpness(fm.Sharding(mesh, RULES, precision=DOUBLE), FEW)
    if fm.is_first_process():
        print(f"sharpness {sharded:.12f} on {mesh.world} {'real' if real else 'simulated'} ranks, {FEW} iterations")
        print(f"          {alone:.12f} on one device")
        converged, dense = sharpness(one, MANY), max(dense_eigenvalues().tolist(), key=abs)
        print(f"          {converged:.12f} on one device, {MANY} iterations")
        print(f"          {dense:.12f} by the eigenvalues of the dense Hessian")
        assert abs(converged - dense) < 1e-11 * abs(dense)
    assert abs(sharded - alone) < 1e-11 * abs(alone)
    fm.leave_processes()
