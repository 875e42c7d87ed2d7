"""Products in fp8 against the same in bfloat16: errors against float64, and times with all casts.

    python tests/bench/fp8.py                         # checks and times of products, about a minute on an H200
    python tests/bench/fp8.py --model 1.2b            # forward and backward of a whole model, compiled, and its loss
    python tests/bench/fp8.py --learn 300             # losses and gradients of a small model, each recipe against none

Each variant that fails prints its traceback, and the others go on. On CPU sizes are small and fp8 is emulated: only the
checks mean something there. "casts" are the parts of a product beside the matrix units: largest magnitudes, scales, casts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.fp8 import Fp8, kernels, scaling
from fmegatron.fp8.cast import cast, scale_of
from fmegatron.fp8.multiply import multiply
from fmegatron.fp8.policy import FORMATS
from fmegatron.graphs import recorded
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.step import TrainState, train_step

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed")
EQUATION = "batch seq embed, embed mlp -> batch seq mlp"
MODELS = {
    "1.2b": dict(layers=16, embed=2048, heads=16, kv_heads=16, mlp=8192, vocab=32768, seq=4096, batch=4),
    "3b": dict(layers=28, embed=3072, heads=24, kv_heads=8, mlp=8192, vocab=32768, seq=4096, batch=4),
    "tiny": dict(layers=2, embed=128, heads=4, kv_heads=4, mlp=256, vocab=256, seq=128, batch=2),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(16384, 2048, 8192), (16384, 3072, 8192)] if DEVICE == "cuda" else [(256, 128, 256)]


def guarded(name: str, f: Callable[[], Any]) -> Any:
    """f(), or None with its traceback printed."""
    try:
        return f()
    except Exception:
        print(f"FAILED {name}\n{traceback.format_exc(limit=-6)}", flush=True)
        return None


def timed(f: Callable[[], Any], repeats: int = 12) -> float:
    """Median milliseconds."""
    for _ in range(3):
        f()
    times = []
    for _ in range(repeats):
        if DEVICE == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            f()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            f()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def sharding(fp8: Fp8 | None, operands: tuple[torch.Tensor, ...] = ()) -> Sharding:
    """bfloat16 with fp8 products; for delayed scaling with a history of these operands."""
    sh = Sharding(precision=Precision(params=torch.bfloat16, fp8=fp8))
    if fp8 is None or fp8.recipe != "delayed":
        return sh
    formats = (FORMATS["e4m3"], FORMATS["e4m3"], fp8.gradient_dtype)
    scales = [scale_of(t.abs().amax().float(), d) for t, d in zip(operands, formats, strict=True)]
    seen = torch.zeros(1, 3, device=DEVICE)
    return dataclasses.replace(sh, fp8=scaling.Layer(names=("dot",), scales=torch.stack(scales)[None], seen=seen))


def operands(t: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, w, gradient): magnitudes differ by column, as a model's do."""
    g = torch.Generator(DEVICE).manual_seed(0)
    new = functools.partial(torch.randn, generator=g, device=DEVICE, dtype=torch.float32)
    x = new(1, t, k) * torch.exp(new(k))
    return x.bfloat16(), (new(k, n) / k**0.5).bfloat16(), (new(1, t, n) * 1e-5).bfloat16()


def both(f: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = f(x, w)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


# --------------------------------------------------------------------------------------------------------------- checks


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def check_casts() -> None:
    """Triton's casts are bitwise those of torch's operations."""
    x = operands(512, 384, 256)[0][0]
    x[3] = 0
    for dtype in FORMATS.values():
        for share in ("tensor", "row", "block", "tile"):

            def one(dtype: torch.dtype = dtype, share: Any = share) -> None:
                found = [cast(x, dtype, share, columns=True, rows=True, use=use)[:2] for use in ("torch", "triton")]
                for a, b in zip(*found, strict=True):
                    assert a is not None and b is not None
                    same = torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
                    assert same, f"{(a.data.view(torch.uint8) != b.data.view(torch.uint8)).sum()} numbers differ"
                    assert torch.equal(a.scale, b.scale), "scales differ"

            guarded(f"casts {share} {dtype}", one)
    scale = scale_of(x.abs().amax().float(), FORMATS["e4m3"]) * 4  # some saturate
    bad = x.clone()
    bad[0, 0], bad[1, 1] = float("inf"), float("nan")
    for use in ("torch", "triton"):
        here, _, size = cast(bad, FORMATS["e4m3"], "tensor", columns=True, rows=False, scale=scale, use=use)
        assert here is not None
        nans = int(here.data.float().isnan().sum())
        print(f"  {use}: {nans} of 2 infinite or undefined numbers stay so; largest noted {float(size):g}")  # type: ignore[arg-type]


def check_products() -> None:
    """Relative errors against float64, and against the emulation of the same numbers."""
    t, k, n = (1024, 512, 1024) if DEVICE == "cuda" else (256, 128, 256)
    x, w, g = operands(t, k, n)
    wide = [a.double() for a in (x[0], w, g[0])]
    want = [wide[0] @ wide[1], wide[2] @ wide[1].t(), wide[0].t() @ wide[2]]
    print(
        f"relative errors against float64, [{t}, {k}] × [{k}, {n}]: forward, by input, by weight (against the emulation)"
    )
    for recipe in RECIPES:
        for how in ("torch", "triton") if DEVICE == "cuda" else ("torch",):

            def one(recipe: Any = recipe, how: Any = how) -> None:
                found = []
                for backend in ("auto", "emulated"):
                    sh = sharding(Fp8(recipe, backend=backend, kernels=how), (x, w, g))
                    found.append(both(lambda x, w, sh=sh: sh.dot(x, w, EQUATION), x, w, g))  # type: ignore[misc]
                errors = [relative(a.reshape(b.shape), b) for a, b in zip(found[0], want, strict=True)]
                other = [relative(a, b) for a, b in zip(*found, strict=True)]
                ok = "ok" if max(errors) < 0.08 and max(other) < 0.01 else "WRONG"
                text = "  ".join(f"{a:.4f} ({b:.0e})" for a, b in zip(errors, other, strict=True))
                print(f"  {recipe:10} {how:6} {text}  {ok}", flush=True)

            guarded(f"product {recipe} {how}", one)


# ---------------------------------------------------------------------------------------------------------------- times


def time_products(recipes: list[str], modes: list[str]) -> None:
    for t, k, n in SIZES:
        x, w, g = operands(t, k, n)
        print(f"[{t}, {k}] × [{k}, {n}]: ms forward, forward + backward (TF)")
        time_product("bf16", sharding(None).dot, x, w, g)
        for recipe in recipes:
            for how in ("triton", "torch"):
                sh = sharding(Fp8(recipe, kernels=how), (x, w, g))  # type: ignore[arg-type]
                if "eager" in modes:
                    time_product(f"{recipe} eager {how}", sh.dot, x, w, g)
                if "compiled" in modes and (t, k, n) == SIZES[0]:
                    torch._dynamo.reset()
                    compiled = torch.compile(product_by(sh), fullgraph=True, dynamic=False)
                    time_product(f"{recipe} compiled {how}", compiled, x, w, g)
        if DEVICE == "cuda":
            time_parts(x[0], w, g[0])


def product_by(sh: Sharding) -> Callable[..., torch.Tensor]:
    return lambda x, w, equation: sh.dot(x, w, equation)


def time_product(
    name: str, dot: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, g: torch.Tensor
) -> None:
    """Prints a row: forward alone, without a graph; and with both gradients."""

    def one() -> None:
        with torch.no_grad():
            forward = timed(lambda: dot(x, w, EQUATION))
        a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
        whole = timed(lambda: torch.autograd.grad(dot(a, b, EQUATION), (a, b), g))
        rate = 6.0 * x.numel() * w.shape[1] / whole / 1e9
        print(f"  {name:32} {forward:7.3f}  {whole:7.3f}  ({rate:5.0f})", flush=True)

    guarded(name, one)


def time_parts(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> None:
    """The three products of casts that are made already, and the casts of x alone, against a copy of x."""
    e4m3, e5m2 = FORMATS["e4m3"], FORMATS["e5m2"]
    print("  the parts: three products of what is cast; casts of x, both ways (GB/s of reading x and writing two)")
    shares = {"tensor": ("tensor", "tensor", e5m2), "row": ("row", "row", e4m3), "block": ("block", "tile", e4m3)}
    for name, (share, tile, grad) in shares.items():

        def one(share: Any = share, tile: Any = tile, grad: torch.dtype = grad, name: str = name) -> None:
            made = {
                m: cast(t, d, s, columns=True, rows=True, use="triton")[:2]
                for m, t, d, s in (("x", x, e4m3, share), ("w", w, e4m3, tile), ("g", g, grad, share))
            }
            pairs = [("x", 0, "w", 1, True), ("g", 0, "w", 0, False), ("x", 1, "g", 1, False)]
            times = [
                timed(
                    lambda a=a, i=i, b=b, j=j, fast=fast: multiply(
                        made[a][i], made[b][j], torch.bfloat16, native=True, fast=fast
                    )
                )  # type: ignore[misc,arg-type]
                for a, i, b, j, fast in pairs
            ]
            text = ", ".join(f"{v:.3f}" for v in times)
            spent = [
                timed(lambda use=use: cast(x, e4m3, share, columns=True, rows=True, use=use))
                for use in ("triton", "torch")
            ]  # type: ignore[misc]
            rate = [4 * x.numel() / v / 1e6 for v in spent]
            print(
                f"    {name:8} {text} ms; casts triton {spent[0]:.3f} ({rate[0]:.0f}), torch {spent[1]:.3f} ({rate[1]:.0f})",
                flush=True,
            )

        guarded(f"parts {name}", one)
    scale = torch.ones((), device=x.device)
    noted = timed(lambda: cast(x, e4m3, "tensor", columns=True, rows=True, scale=scale, use="triton"))
    largest = timed(lambda: kernels.largest_of_all(x, "triton"))
    print(
        f"    casts of x with a known scale {noted:.3f} ms, its largest magnitude {largest:.3f}, a copy of x {timed(x.clone):.3f}"
    )


def time_model(name: str, recipes: list[str], how: str, fused: bool, eager: bool, repeats: int) -> None:
    """Forward and backward of a whole model, its variants in turn; every weight is cast anew in each."""
    sizes = dict(MODELS[name])
    seq, batch = sizes.pop("seq"), sizes.pop("batch")
    c = DecoderConfig(**sizes, max_seq=seq, fused_qkv=fused, fused_gate_up=fused)  # type: ignore[arg-type]
    ids = torch.randint(0, c.vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    data = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    params = init(Decoder(c).spec(), key(0), sh=sharding(None), device=DEVICE)
    steps: dict[str, Callable[[], Any]] = {}
    for recipe in ("bf16", *recipes):
        fp8 = None if recipe == "bf16" else Fp8(recipe, kernels=how)  # type: ignore[arg-type]
        sh = Sharding(precision=Precision(params=torch.bfloat16, fp8=fp8))
        model = Decoder(c, compile=not eager)
        extras = scaling.init(fp8, model.spec(), device=DEVICE)

        def step(model: Decoder = model, sh: Sharding = sh, extras: Any = extras, box: dict = {}) -> float:  # noqa: B006
            state = box.get(id(model), extras)
            now = scaling.begin(sh, state, spec=model.spec())
            (loss, _), _ = accumulate(model.loss, 1, weights=model.weights)(params, data, Ctx(sh=now))
            box[id(model)] = scaling.end(now, state)
            return loss

        began = time.perf_counter()
        losses = guarded(recipe, lambda step=step: [float(step()) for _ in range(3)])  # type: ignore[misc]
        if losses is not None:
            steps[recipe] = step
            print(
                f"  {recipe:10} loss {losses[-1]:.5f}, first three runs {time.perf_counter() - began:.0f} s", flush=True
            )
    times: dict[str, list[float]] = {n: [] for n in steps}
    for n in range(repeats):
        for name_, step_ in list(steps.items())[:: 1 if n % 2 else -1]:
            times[name_].append(timed(step_, 1))
    flops = Decoder(c).flops_per_token(seq) * batch * seq
    for name_, values in times.items():
        ms = statistics.median(values)
        print(
            f"  {name_:10} {ms:8.2f} ms  {flops / ms / 1e9:5.0f} TF  {ms / statistics.median(times['bf16']):.3f} of bf16",
            flush=True,
        )


# ------------------------------------------------------------------------------------------------------------- learning


def learn(steps: int, recipes: list[str], out: str | None) -> None:
    """A small model with every recipe and without: the final loss (mean of the last twenty steps); and the cosine of its
    gradient and bfloat16's, the least of all layers and of all leaves, at the first parameters and at those after the run
    without fp8. On a GPU steps are recorded."""
    c = DecoderConfig(vocab=256, embed=256, layers=4, heads=8, kv_heads=8, head=32, mlp=512, max_seq=256)
    model, spec = Decoder(c), Decoder(c).spec()
    first = init(spec, key(0), sh=learning(None), device=DEVICE)
    found: dict[str, dict[str, float]] = {}
    after: dict[str, Any] = {"first": first}
    for recipe in (None, *recipes):
        name = recipe or "bf16"

        def one(recipe: str | None = recipe, name: str = name) -> Any:
            began = time.perf_counter()
            params, losses = trained(model, recipe, steps)
            final = float(torch.stack(losses[-20:]).mean())
            row = found[name] = {"loss": final, "over_bf16": final / found["bf16"]["loss"] - 1 if recipe else 0.0}
            text = f"  {name:10} {final:.5f}  {100 * row['over_bf16']:+.2f} %"
            if recipe:
                for when, at in after.items():
                    layers, leaves = cosines(model, recipe, at)
                    row |= {f"cosine_layer_{when}": layers, f"cosine_leaf_{when}": leaves}
                    text += f"  cosine at the {when} parameters: layers {layers:.4f}, leaves {leaves:.4f}"
            print(f"{text}  ({time.perf_counter() - began:.0f} s)", flush=True)
            after.setdefault("last", params)

        guarded(f"learning {name}", one)
        if out:
            Path(out).write_text(json.dumps(found, indent=1))


def learning(recipe: str | None) -> Sharding:
    """Parameters in float32, on a GPU computed in bfloat16."""
    compute = torch.bfloat16 if DEVICE == "cuda" else None
    return Sharding(precision=Precision(compute=compute, fp8=None if recipe is None else Fp8(recipe)))  # type: ignore[arg-type]


def text(n: int) -> dict[str, torch.Tensor]:
    """Batch n of a text that can be learned."""
    g = torch.Generator().manual_seed(n)
    ids = ((torch.randint(1, 9, (8, 257), generator=g).cumsum(1) * 7 + n) % 251).to(DEVICE)
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def trained(model: Decoder, recipe: str | None, steps: int) -> tuple[Any, list[torch.Tensor]]:
    """(parameters, the loss of every step); not recorded where that fails."""
    sh, spec = learning(recipe), model.spec()
    for wrap in (recorded, lambda step: step):
        optimizer = adamw(2e-3)
        options: dict[str, Any] = {"sh": sh, "spec": spec, "donate": True, "check_finite": False}
        step = wrap(train_step(model.loss, optimizer, weights=model.weights, **options))
        params = init(spec, key(0), sh=sh, device=DEVICE)
        extras = scaling.init(sh.precision.fp8, spec, device=DEVICE)
        state = TrainState(0, params, optimizer.init(params), extras=extras)
        losses = []
        try:
            for n in range(steps):
                state, metrics = step(state, text(n))
                losses.append(metrics["loss"])
        except UserError as error:
            if wrap is not recorded:
                raise
            print(f"  {recipe}: not recorded: {error}", flush=True)
            continue
        break
    return tree.tree_map(torch.clone, state.params), losses


def cosines(model: Decoder, recipe: str, params: Any) -> tuple[float, float]:
    """Of the gradients with fp8 and without: the least of all layers, and of all their matrices."""
    vectors = []
    for how in (None, recipe):
        sh, spec = learning(how), model.spec()
        extras = scaling.init(sh.precision.fp8, spec, device=DEVICE)
        for n in (2, 1, 0):  # delayed scaling looks back
            now = scaling.begin(sh, extras, spec=spec)
            _, grads = accumulate(model.loss, weights=model.weights)(params, text(10**6 + n), Ctx(sh=now))
            extras = scaling.end(now, extras)
        vectors.append(
            {path: g.double().flatten() for path, g in tree.named(grads).items() if path.startswith("layers.")}
        )
    layers = sorted({path.split(".")[1] for path in vectors[0]})
    whole = [
        [torch.cat([v for path, v in found.items() if path.split(".")[1] == layer]) for layer in layers]
        for found in vectors
    ]
    cosine = torch.nn.functional.cosine_similarity
    matrices = [path for path, p in tree.named(params).items() if p.ndim > 1 and path.startswith("layers.")]
    return (
        min(float(cosine(a, b, dim=0)) for a, b in zip(*whole, strict=True)),
        min(float(cosine(vectors[0][path], vectors[1][path], dim=0)) for path in matrices),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--modes", nargs="*", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch", "triton"], help="of --model")
    parser.add_argument("--fused", action="store_true", help="of --model: one leaf for q, k, v and one for gate, up")
    parser.add_argument("--eager", action="store_true", help="--model without torch.compile")
    parser.add_argument("--repeats", type=int, default=10, help="of --model")
    parser.add_argument("--learn", type=int, metavar="STEPS")
    parser.add_argument("--out", help="of --learn: JSON")
    a = parser.parse_args()
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, emulated"
    print(f"torch {torch.__version__}, {where}", flush=True)
    if a.learn:
        learn(a.learn, a.recipes, a.out)
    elif a.model:
        time_model(a.model, a.recipes, a.kernels, a.fused, a.eager, a.repeats)
    else:
        if DEVICE == "cuda":
            guarded("casts", check_casts)
        guarded("products", check_products)
        time_products(a.recipes, a.modes if DEVICE == "cuda" else ["eager"])


if __name__ == "__main__":
    main()
