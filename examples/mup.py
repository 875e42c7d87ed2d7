"""µP (Yang et al. 2022, "Tensor Programs V") by named dims, and its coordinate check as a picture.

A `Param` names its dims. From those that are width follow, for Adam, the initial standard deviation, the learning rate
and, where a parameter ends in something of fixed size, a multiplier. The coordinate check trains models of several
widths for a few steps: with µP the change of the activations does not depend on the width, with the standard
parametrization it grows. The program fits the slopes (log change by log width) and asserts that.

    python mup.py --out coordinates.svg
"""

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import fmegatron as fm
from fmegatron.primitives import attention, cross_entropy, embedding, rms_norm, swiglu

VOCAB, HEAD, LAYERS, ROWS, SEQ, STEPS = 16, 8, 2, 8, 16, 4
WIDTH_DIMS = {"embed", "heads", "mlp"}  # what grows; vocab, head (so the scores' scale too) and layers stay
BASE, RATE = 64, 1e-2  # the width at which both parametrizations are the same, and its learning rate


def spec(width):
    """The model at a width, as at BASE: standard deviations are what one would tune there."""
    heads, mlp = width // HEAD, 2 * width
    layer = {
        "norm": fm.Param((width,), "embed", fm.ones()),
        "qkv": fm.Param((3, width, heads, HEAD), "three embed heads head", fm.normal(BASE**-0.5)),
        "out": fm.Param((heads, HEAD, width), "heads head embed", fm.normal(BASE**-0.5)),
        "mlp_norm": fm.Param((width,), "embed", fm.ones()),
        "gate_up": fm.Param((2, width, mlp), "two embed mlp", fm.normal(BASE**-0.5)),
        "down": fm.Param((mlp, width), "mlp embed", fm.normal((2 * BASE) ** -0.5)),
    }
    return {
        "embed": fm.Param((VOCAB, width), "vocab embed", fm.normal(1.0)),
        "layers": dict.fromkeys(range(LAYERS), layer),
        "norm": fm.Param((width,), "embed", fm.ones()),
        "head": fm.Param((width, VOCAB), "embed vocab", fm.normal(BASE**-0.5)),
    }


def kind(param):
    """What a parameter is to width: it maps width to width ("matrix"), width to something else ("output"), or it is a
    vector of width ("input": a table's rows, a norm's weights)."""
    wide = [name in WIDTH_DIMS for name in param.names]
    return "matrix" if sum(wide) > 1 else "input" if wide[-1] else "output"


def parametrize(spec, growth, mup):
    """(spec with its initial values, `lr_scale` of the optimizer, factor of the logits) at `growth` times the base
    width.

    Both draw matrices with deviations of 1/√growth. µP (for Adam): matrices learn at 1/growth; an output keeps its
    deviation and its rate, and what it gives is divided by growth. Standard: an output is one more matrix, and all
    parameters learn at one rate.
    """

    def initial(param):
        narrow = kind(param) == "matrix" or (kind(param) == "output" and not mup)
        return replace(param, init=fm.normal(param.init.std * growth**-0.5)) if narrow else param

    rates = fm.optim.per_leaf(spec, 1.0, {lambda path, p: kind(p) == "matrix": 1 / growth if mup else 1.0})
    return fm.tree.tree_map(initial, spec), rates, 1 / growth if mup else 1.0


def activations(params, tokens, logits_factor):
    """{name: values} of the stream behind each block, and of the logits."""
    x, found = embedding(params["embed"], tokens), {}
    for i, p in params["layers"].items():
        q, k, v = torch.einsum("bse,tenh->tbsnh", rms_norm(x, p["norm"]), p["qkv"])
        x = x + torch.einsum("bsnh,nhe->bse", attention(q[..., None, :], k, v)[..., 0, :], p["out"])
        gate, up = torch.einsum("bse,tem->tbsm", rms_norm(x, p["mlp_norm"]), p["gate_up"])
        x = found[f"block {i}"] = x + swiglu(gate, up) @ p["down"]
    return {**found, "logits": rms_norm(x, params["norm"]) @ params["head"] * logits_factor}


def changes(width, mup):
    """{activation: the root mean square of its change in STEPS steps of Adam}."""
    model, rates, factor = parametrize(spec(width), width / BASE, mup)
    optimizer = fm.optim.adam(RATE, lr_scale=rates)
    text = fm.random.randint(fm.key(1), (ROWS, SEQ + 1), 0, VOCAB).cumsum(1) % VOCAB
    tokens, labels = text[:, :-1], text[:, 1:]

    def loss(params):
        return cross_entropy(activations(params, tokens, factor)["logits"], labels).mean()

    params = fm.init(model, fm.key(0))
    state, first = optimizer.init(params), activations(params, tokens, factor)
    for _ in range(STEPS):
        _, grads = fm.value_and_grad(loss)(params)
        params, _, state = optimizer.update(params, grads, state)
    last = activations(params, tokens, factor)
    return {name: float((last[name] - first[name]).square().mean().sqrt()) for name in first}


def slope(widths, values):
    """Of the straight line through (log width, log value): 0 is flat, 1 is proportional to width."""
    x, y = (torch.tensor([math.log(v) for v in values], dtype=torch.float64) for values in (widths, values))
    return float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum())


def picture(widths, curves):
    """An SVG of {(parametrization, activation): change by width}, both axes logarithmic."""

    def line(scheme, name, values):
        points = [(math.log2(width), math.log2(value)) for width, value in zip(widths, values, strict=True)]
        colour = fm.plot.TRAIN if scheme == "µP" else fm.plot.VALIDATION
        return fm.plot.Series(f"{scheme}, {name}", points, colour, dashed=name != "logits", dots=True)

    series = [line(*key, values) for key, values in curves.items()]
    every = [y for one in series for _, y in one.points]
    return fm.plot.chart(
        series,
        title=f"Change of activations after {STEPS} steps of Adam",
        x_label="log2 of the width",
        y_label="log2 of the change",
        y_range=(min(every), max(every) + 2),  # room for the legend
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--out", type=Path, help="where the picture goes (default: a temporary file)")
    arguments = parser.parse_args()
    widths, curves = arguments.widths, {}
    for scheme in ("standard", "µP"):
        found = [changes(width, scheme == "µP") for width in widths]
        for name in found[0]:
            curves[scheme, name] = [point[name] for point in found]
            values = " ".join(f"{v:8.3f}" for v in curves[scheme, name])
            print(f"{scheme:9} {name:8} {values}   slope {slope(widths, curves[scheme, name]):+.2f}")
    out = arguments.out or Path(tempfile.mkdtemp()) / "coordinates.svg"
    out.write_text(picture(widths, curves), encoding="utf-8")
    print(f"picture: {out}")
    for (scheme, name), values in curves.items():
        assert (abs(slope(widths, values)) < 0.1) if scheme == "µP" else (slope(widths, values) > 0.3), (scheme, name)
