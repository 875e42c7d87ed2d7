"""MAML (Finn et al. 2017): the gradient through a few inner gradient steps, second order, on sinusoid regression.

The inner loop calls `value_and_grad` and an optimizer like any training. Inside `torch.func.grad` both are
differentiable, so the outer gradient goes through the inner updates; `vmap` runs all tasks at once. What it shows, in
float64: the outer gradient equals a central difference (and the first-order approximation does not), and
the learnt initial values adapt to a new sinusoid in a few steps, as the first ones do not.

    python maml.py --steps 300
"""

import argparse
import math

import torch

import fmegatron as fm

HIDDEN, SHOTS, TASKS, INNER_STEPS, INNER_RATE = 40, 10, 16, 3, 0.05
SH = fm.Sharding(precision=fm.Precision(params=torch.float64))
SPEC = {
    "w1": fm.Param((1, HIDDEN), "x hidden1", fm.normal(1.0)),
    "b1": fm.Param((HIDDEN,), "hidden1", fm.normal(1.0)),
    "w2": fm.Param((HIDDEN, HIDDEN), "hidden1 hidden2", fm.normal(HIDDEN**-0.5)),
    "b2": fm.Param((HIDDEN,), "hidden2", fm.zeros()),
    "w3": fm.Param((HIDDEN, 1), "hidden2 y", fm.normal(HIDDEN**-0.5)),
}
inner = fm.optim.sgd(INNER_RATE)


def error(params, points):
    """The mean squared error of the network on points (x, y), each [shots 1]."""
    x, y = points
    h = torch.tanh(x @ params["w1"] + params["b1"])
    h = torch.tanh(h @ params["w2"] + params["b2"])
    return (h @ params["w3"] - y).square().mean()


def adapt(params, points, steps=INNER_STEPS, first_order=False):
    """A few steps of gradient descent from `params` on the points of one task."""
    state = inner.init(params)
    for _ in range(steps):
        _, grads = fm.value_and_grad(error)(params, points)
        grads = fm.tree.detached(grads) if first_order else grads
        params, _, state = inner.update(params, grads, state)
    return params


def after_adaptation(params, tasks, first_order=False):
    """The outer loss: the mean error on new points of each task, after adapting to its other points."""

    def of_one(support, query):
        return error(adapt(params, support, first_order=first_order), query)

    return torch.func.vmap(of_one)(*tasks).mean()


def sinusoids(key, tasks=TASKS):
    """(support, query) points of random sinusoids: x and y, each [tasks shots 1]."""

    def draw(name, shape, low, high):
        return fm.random.uniform(fm.fold_in(key, name), shape, low=low, high=high, dtype=torch.float64)

    amplitude, phase = draw("amplitude", (tasks, 1, 1), 0.5, 2.0), draw("phase", (tasks, 1, 1), 0.0, math.pi)
    xs = [draw(name, (tasks, SHOTS, 1), -3.0, 3.0) for name in ("support", "query")]
    return [(x, amplitude * torch.sin(x + phase)) for x in xs]


def check_gradient(params, tasks):
    """Relative errors of the outer gradient, exact and first-order, along a random direction."""
    direction = fm.init(SPEC, fm.key(1), sh=SH)

    def slope(gradient):
        return sum((g * d).sum() for g, d in zip(fm.tree.leaves(gradient), fm.tree.leaves(direction), strict=True))

    def moved(by):
        return after_adaptation(fm.tree.tree_map(lambda p, d: p + by * d, params, direction), tasks)

    h = 1e-3  # a central difference of fourth order
    difference = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
    first_order = torch.func.grad(lambda p: after_adaptation(p, tasks, first_order=True))(params)
    exact = torch.func.grad(after_adaptation)(params, tasks)
    return [float(abs(slope(g) / difference - 1)) for g in (exact, first_order)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="outer steps")
    steps = parser.parse_args().steps
    params, new = fm.init(SPEC, fm.key(0), sh=SH), sinusoids(fm.key(2), 100)
    exact, first_order = check_gradient(params, sinusoids(fm.key(3)))
    print(f"outer gradient against a central difference: off by {exact:.0e} (first-order MAML: {first_order:.0e})")
    assert exact < 1e-7 and first_order > 1e-3

    outer = fm.optim.adamw(3e-3, weight_decay=0.0)
    state, before = outer.init(params), after_adaptation(params, new)
    for i in range(steps):
        grads = torch.func.grad(after_adaptation)(params, sinusoids(fm.fold_in(fm.key(4), i)))
        params, _, state = outer.update(params, grads, state)
    after = after_adaptation(params, new)
    print(
        f"error on new tasks after {INNER_STEPS} inner steps: {before:.3f}, and {after:.3f} after {steps} outer steps"
    )
    assert after < before / 2
