"""torch.func over value_and_grad, remat, stack and accumulate: each equal to the same transform of plain torch operations."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch.func import grad, jacrev, jvp, vjp, vmap

from fmegatron.accumulate import accumulate
from fmegatron.grad import value_and_grad
from fmegatron.parallel.stack import stack
from tests.transforms_model import (
    HALF,
    POLICIES,
    T,
    block,
    close,
    copies,
    halve,
    loop,
    loss_of,
    make_batch,
    make_params,
    ordinary,
    ref_run,
    rematted,
    scalar_of,
    unhalve,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore")
flat = pytree.tree_leaves
P, V, B = make_params(layers=2), make_params(layers=2, seed=5), make_batch(rows=4)


def one(batch):
    return {k: t[None] for k, t in batch.items()}


def along(g):
    return sum((s * t).sum() for s, t in zip(flat(g), flat(V), strict=True))


def twice(gradient_of, p):
    q = copies(p)
    return torch.autograd.grad(along(gradient_of(q)), flat(q), allow_unused=True, materialize_grads=True)


TRANSFORMS = {
    "torch.autograd.grad": lambda f: torch.autograd.grad(f(q := copies(P), B), flat(q)),
    "value_and_grad": lambda f: value_and_grad(f)(P, B)[1],
    "grad": lambda f: grad(f)(P, B),
    "vjp": lambda f: vjp(lambda p: f(p, B), P)[1](torch.tensor(1.0, dtype=T))[0],
    "vmap(grad)": lambda f: vmap(grad(lambda p, b: f(p, one(b))), (None, 0))(P, B),
    "vmap(value_and_grad)": lambda f: vmap(lambda b: value_and_grad(lambda p: f(p, one(b)))(P)[1])(B),
    "jacrev(grad)": lambda f: jacrev(lambda n: grad(lambda p: f(p, B))({**P, "norm": n})["norm"])(P["norm"]),
    "jacrev(value_and_grad)": lambda f: jacrev(
        lambda n: value_and_grad(lambda p: f(p, B))({**P, "norm": n})[1]["layers"][0]["bias"]
    )(P["norm"]),
    "HVP grad(grad)": lambda f: grad(lambda p: along(grad(f)(p, B)))(P),
    "HVP grad(value_and_grad)": lambda f: grad(lambda p: along(value_and_grad(f)(p, B)[1]))(P),
    "HVP create_graph": lambda f: twice(lambda q: torch.autograd.grad(f(q, B), flat(q), create_graph=True), P),
    "HVP autograd(value_and_grad)": lambda f: twice(lambda q: value_and_grad(f)(q, B)[1], P),
}
FUNCTIONS = {
    f"{how} {policy}": scalar_of(ordinary({"stack": stack, "loop": loop}[how](rematted(block, save))))
    for policy, save in POLICIES.items()
    for how in ("stack", "loop")
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_transform_of_each_policy(transform):
    g = TRANSFORMS[transform]
    want = flat(g(scalar_of(ref_run)))
    for f in FUNCTIONS.values():
        close(flat(g(f)), want)


@pytest.mark.parametrize("policy", ["everything", "nothing"])
def test_of_stored_parameters(policy):
    """A stack that gathers: the gradient arrives in the layout at rest, twice over too."""
    p, v = halve(P), halve(V)

    def along(g):
        return sum((s * t).sum() for s, t in zip(flat(g), flat(v), strict=True))

    f = scalar_of(ordinary(stack(rematted(block, POLICIES[policy]), store=HALF)))
    ref = scalar_of(lambda p, ctx: ref_run(unhalve(p), ctx))
    close(flat(grad(f)(p, B)), flat(grad(ref)(p, B)))
    hvp = [grad(lambda p, h=h: along(grad(h)(p, B)))(p) for h in (f, ref)]
    close(flat(hvp[0]), flat(hvp[1]))
    close(flat(grad(lambda p: along(value_and_grad(f)(p, B)[1]))(p)), flat(hvp[1]))


def test_of_accumulate():
    """The gradient of a function of accumulated gradients, and accumulation for each of several parameters."""
    f = accumulate(loss_of(ordinary(stack(rematted(block, POLICIES["nothing"])))), 2, weights=weights)
    want = grad(lambda p: along(grad(scalar_of(ref_run))(p, B)))(P)
    close(flat(grad(lambda p: along(f(p, B)[1]))(P)), flat(want))
    q = copies(P)
    close(torch.autograd.grad(along(f(q, B)[1]), flat(q)), flat(want))
    several = pytree.tree_map(lambda a, b: torch.stack([a, b]), P, V)
    got = vmap(lambda p: f(p, B)[1])(several)
    close(flat(got), flat(pytree.tree_map(lambda a, b: torch.stack([a, b]), *(f(p, B)[1] for p in (P, V)))))


def test_forward_mode_is_refused():
    for name, f in FUNCTIONS.items():
        if "everything" not in name:
            with pytest.raises((NotImplementedError, RuntimeError)):
                jvp(lambda p, f=f: grad(f)(p, B), (P,), (V,))
