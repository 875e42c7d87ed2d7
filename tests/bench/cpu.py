"""Training on a CPU against the same mathematics as a plain nn.Module with torch.optim, in ratios of one run.

    python tests/bench/cpu.py [--pairs 21] [--threads 1] [--only train host own import] [--clock cpu|wall]

    train    the step of `fmegatron train` without further arguments (tiny Llama, 16 × 256 tokens, clipping, AdamW)
    host     a step so small that the host is all there is (2 layers of width 64, 16 tokens): forward and backward, and whole
    own      the step of examples/own_model.py, on its mesh of one rank, in two microbatches
    import   `import fmegatron`, models, primitives and optimizers, beyond `import torch`

`train` and `host` are measured as they are and recorded (`fm.recorded`, fmegatron/calls.py), each beside the peer.

The peer is what one would write by hand: nn.Linear, scaled_dot_product_attention, cross_entropy, clip_grad_norm_, and
the fused AdamW of torch.optim with the same groups. It starts from the same weights and takes the same batches; the
losses of both are compared before anything is timed. The two take turns in one process, the order changing with every
pair. Printed are the median of the pairs' ratios and the interval that holds the true median with a probability of
95 % (order statistics: no assumption on the noise); its upper end is the figure that counts. Times are those that this
process spent on a processor, which other processes disturb least; `--clock wall` takes the time of day, for several
threads on a quiet machine.

Ratios with one thread, torch 2.13, and the upper end of the interval:

                                  as it is          recorded
    host, forward and backward    1.65 (1.78)       0.70 (0.74)
    host, whole step              1.74 (1.85)       0.71 (0.73)
    train                         0.97 (0.99)       0.95 (0.98)

The whole step of `host` comes to 558 calls of torch's dispatcher, of which a recording plays 362, in 1290 µs (the least
of 200 runs); 1500 with the batch, the numbers and the metrics around it, where the peer takes 2060.

What `host` as it is is made of (forward and backward, µs, the least of 400 runs; the peer takes 1950: 850 forward, 1100
backward). torch is called 221 times from Python where the peer calls it 67 times, at 1 to 3 µs a call and twice as much
in a step, whose code does not stay in the cache; Python calls 1250 functions of its own, the peer 170:

    forward 1450      14 products 270, 5 norms with the additions before them 310, attention 180, queries and keys turned
                      120, gated activations 50, the loss 180, embeddings 30; blocks, layers and context around them 310
    backward 1440     our nodes of the graph 620 (norms 185, attention 155, loss 140, turns 85, gated 55); autograd and its
                      own nodes, of the products above all, 820
    around it 390     weights, sums and metrics 170; trees taken apart and put together, leaves of the graph 150; the rest 70

A norm, a turn, an attention and a loss are nodes of our own for what they keep (a norm its input and one number a row,
a turn its table alone, a loss no logits), for second derivatives, and for torch.func: 12 of them, each some 15 µs more
than one of torch's. Of the 1330 µs above the peer's, forward has 600, backward 340, and what is around them 390.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fmegatron as fm
from fmegatron.models import PRESETS, Decoder, DecoderConfig
from fmegatron.optim import decay_mask
from fmegatron.primitives import embedding, linear_cross_entropy, rms_norm, swiglu

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
LR, DECAY, CLIP = 3e-3, 0.1, 1.0


# ------------------------------------------------------------------------------------------------------------ measuring


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Two of the values between which the true median lies with at least this probability, whatever the distribution."""
    ordered, n = sorted(values), len(values)
    below = [sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range(n)]  # P(at most k lie under the median)
    outside = max((k for k in range(n // 2) if below[k] <= (1 - level) / 2), default=-1)
    return (ordered[outside + 1], ordered[-outside - 2]) if outside >= 0 else (ordered[0], ordered[-1])


def compared(
    name: str, ours: Callable[[], object], peer: Callable[[], object], *, pairs: int, repeats: int, clock: str
) -> tuple[float, float, float]:
    """Times the two in turns, prints a line, and returns the median ratio with its interval."""
    now, times = CLOCKS[clock], ([], [])  # type: ignore[var-annotated]
    for n in range(pairs + 2):
        for which in (0, 1) if n % 2 else (1, 0):
            start = now()
            for _ in range(repeats):
                (ours, peer)[which]()
            if n >= 2:
                times[which].append((now() - start) / repeats)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    low, high = interval(ratios)
    a, b = (1e3 * statistics.median(t) for t in times)
    middle = statistics.median(ratios)
    print(
        f"{name:37} {a:9.3f} ms {b:9.3f} ms  ratio {middle:.3f}  95 % of the median: {low:.3f} to {high:.3f}",
        flush=True,
    )
    return middle, low, high


def check_losses(name: str, ours: Callable[[], object], peer: Callable[[], object], steps: int = 4) -> None:
    """Both must compute the same: the losses of the first steps."""
    for _ in range(steps):
        a, b = (float(f().detach()) for f in (ours, peer))  # type: ignore[attr-defined]
        if not math.isclose(a, b, rel_tol=2e-4):
            raise SystemExit(f"{name}: the losses differ, {a} and {b}, so that their times say nothing")


# -------------------------------------------------------------------------------------------------------------- the peer


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = c.heads, c.kv_heads, c.head
        self.q = nn.Linear(c.embed, c.heads * c.head, bias=False)
        self.k = nn.Linear(c.embed, c.kv_heads * c.head, bias=False)
        self.v = nn.Linear(c.embed, c.kv_heads * c.head, bias=False)
        self.o = nn.Linear(c.heads * c.head, c.embed, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = turned(self.q(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2), cos, sin)
        k = turned(self.k(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2), cos, sin)
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, embed: int, mlp: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(embed, mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp, embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(c.embed, c.norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(c), FeedForward(c.embed, c.mlp)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, c: DecoderConfig, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.embed)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.embed, c.norm_eps)
        self.head = nn.Linear(c.embed, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight
        frequencies = 1.0 / c.rope_base ** (torch.arange(0, c.head, 2) / c.head)
        angle = torch.arange(seq)[:, None] * torch.cat([frequencies, frequencies])
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, (cos, sin) = self.embed(tokens), (self.cos, self.sin)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))

    @torch.no_grad()
    def load(self, params: dict) -> None:
        """The weights of our tree, whose matrices are [in out] with named heads."""
        self.embed.weight.copy_(params["embed"])
        self.norm.weight.copy_(params["norm"])
        if "head" in params:
            self.head.weight.copy_(params["head"])
        for index, layer in enumerate(self.layers):
            p = params["layers"][index]
            for n in ("norm1", "norm2"):
                getattr(layer, n).weight.copy_(p[n])
            for n in "qkv":
                getattr(layer.attention, n).weight.copy_(p[n].flatten(1).T)
            layer.attention.o.weight.copy_(p["o"].flatten(0, -2).T)
            for n in ("gate", "up", "down"):
                getattr(layer.mlp, n).weight.copy_(p[n].T)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x[batch head seq feature]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def fused_adamw(model: nn.Module, betas: tuple[float, float] = (0.9, 0.95)) -> torch.optim.Optimizer:
    """Weight decay of matrices alone, as in `fmegatron train`."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=betas, eps=1e-8, fused=True)


def peer_step(model: nn.Module, batches: list[dict[str, Tensor]]) -> Callable[[], Tensor]:
    """A whole step; `batches` are its microbatches."""
    optimizer = fused_adamw(model)
    params = list(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            logits = model(batch["tokens"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / len(batches)
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        return total  # type: ignore[return-value]

    return step


# ------------------------------------------------------------------------------------------------------------- the cases


def tokens_of(vocab: int, batch: int, seq: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def decoders(c: DecoderConfig, batch: dict[str, Tensor]) -> tuple[Decoder, dict, Llama]:
    model = Decoder(c)
    params = fm.init(model.spec(), fm.key(0))
    peer = Llama(c, batch["tokens"].shape[1])
    peer.load(params)
    return model, params, peer


def our_step(model: Decoder, params: dict, batch: dict[str, Tensor], *, played: bool = False) -> Callable[[], Tensor]:
    """The step of `fmegatron train`: norms, metrics and the check for what is not finite included; or recorded, and without
    the check."""
    spec = model.spec()
    optimizer = fm.optim.chain(
        fm.optim.clip_by_global_norm(CLIP), fm.optim.adamw(LR, weight_decay=DECAY, mask=decay_mask(spec))
    )
    step = fm.train_step(model.loss, optimizer, weights=model.weights, spec=spec, donate=True, check_finite=not played)
    step = fm.recorded(step) if played else step
    box = [fm.TrainState(0, params, optimizer.init(params), fm.key(1))]

    def run() -> Tensor:
        box[0], metrics = step(box[0], batch)
        return metrics["loss"]

    return run


def whole_step(name: str, c: DecoderConfig, batch: dict[str, Tensor], **options: object) -> None:
    for played in (False, True):
        model, params, peer = decoders(c, batch)
        ours, theirs = our_step(model, params, batch, played=played), peer_step(peer, [batch])
        check_losses(name, ours, theirs)
        compared(f"{name}{', recorded' * played}", ours, theirs, **options)  # type: ignore[arg-type]


def gradients_alone(name: str, c: DecoderConfig, batch: dict[str, Tensor], **options: object) -> None:
    model, params, peer = decoders(c, batch)
    run, leaves = fm.accumulate(model.loss, weights=model.weights), list(peer.parameters())

    def ours() -> Tensor:
        return run(params, batch, fm.Ctx())[0][0]

    def theirs() -> Tensor:
        loss = F.cross_entropy(peer(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        torch.autograd.grad(loss, leaves)
        return loss

    def gradients(params: dict, batch: dict[str, Tensor]) -> tuple[dict, dict]:
        (loss, _), grads = run(params, batch, fm.Ctx())
        return params, {"loss": loss, "grads": grads}

    played = fm.recorded(gradients)
    forms = {"": ours, ", recorded": lambda: played(params, batch)[1]["loss"]}
    for form, call in forms.items():
        check_losses(name, call, theirs)
        compared(name + form, call, theirs, **options)  # type: ignore[arg-type]


def train(a: argparse.Namespace) -> None:
    whole_step(
        "train: tiny, 16 × 256", PRESETS["tiny"], tokens_of(4096, 16, 256), pairs=a.pairs, repeats=1, clock=a.clock
    )


def host(a: argparse.Namespace) -> None:
    c, batch = DecoderConfig(vocab=64, embed=64, layers=2, heads=4, mlp=128), tokens_of(64, 1, 16)
    options = dict(pairs=max(a.pairs, 31), repeats=20, clock=a.clock)
    gradients_alone("host: forward and backward", c, batch, **options)
    whole_step("host: whole step", c, batch, **options)


class OwnPeer(nn.Module):
    """examples/own_model.py as a module."""

    def __init__(self, vocab: int, embed: int, mlp: int, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, embed), nn.Linear(embed, vocab, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(embed, 1e-6) for _ in range(layers))
        self.mlps = nn.ModuleList(FeedForward(embed, mlp) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return self.head(x)

    @torch.no_grad()
    def load(self, params: dict) -> None:
        self.embed.weight.copy_(params["embed"])
        self.head.weight.copy_(params["head"])
        for index, (norm, mlp) in enumerate(zip(self.norms, self.mlps, strict=True)):
            p = params["layers"][index]
            norm.weight.copy_(p["norm"])
            for n in ("gate", "up", "down"):
                getattr(mlp, n).weight.copy_(p[n].T)


def own(a: argparse.Namespace) -> None:
    vocab, embed, mlp, layers = 64, 32, 96, 2
    layer = {
        "norm": fm.Param((embed,), "embed", fm.ones(), over="batch seq*"),
        "gate": fm.Param((embed, mlp), "embed mlp", over="batch seq"),
        "up": fm.Param((embed, mlp), "embed mlp", over="batch seq"),
        "down": fm.Param((mlp, embed), "mlp embed", over="batch seq"),
    }
    table = fm.Param((vocab, embed), "vocab embed", fm.normal(0.5), over="batch seq")
    spec = {"embed": table, "layers": dict.fromkeys(range(layers), layer), "head": table}

    def loss(params: dict, batch: dict[str, Tensor], ctx: fm.Ctx) -> tuple[fm.Term, None]:
        sh, p = ctx.sh, ctx.sh.use(params, spec)
        x = embedding(p["embed"], batch["tokens"], sh=sh, vocab_size=vocab)
        for layer in p["layers"].values():
            h = sh(rms_norm(x, layer["norm"]), "batch seq* embed -> batch seq embed | mlp")
            gate, up = (sh.dot(h, layer[n], "batch seq embed, embed mlp -> batch seq mlp") for n in ("gate", "up"))
            x = x + sh.dot(swiglu(gate, up), layer["down"], "batch seq mlp, mlp embed -> batch seq* embed")
        h = sh(x, "batch seq* embed -> batch seq embed | vocab")
        equation = "batch seq embed, vocab embed -> batch seq vocab"
        each = linear_cross_entropy(h, p["head"], batch["labels"], equation=equation, sh=sh, vocab_size=vocab)
        return fm.Term(each, "batch seq", weight=torch.ones_like(each)), None

    rows = {"batch": "dp", "seq": None, "seq*": "tp", "embed": None, "mlp": "tp", "vocab": "tp"}
    sh = fm.Sharding(fm.make_mesh("dp=1,tp=1", device="cpu"), fm.Rules(rows, store="dp"))
    optimizer = fm.optim.chain(
        fm.optim.clip_by_global_norm(CLIP), fm.optim.adamw(LR, weight_decay=DECAY, mask=decay_mask(spec))
    )
    gradients = fm.accumulate(loss, microbatches=2)
    params = fm.init(spec, fm.key(0), sh=sh)
    batch = tokens_of(vocab, 8, 16)
    peer = OwnPeer(vocab, embed, mlp, layers)
    peer.load(params)
    box = [fm.TrainState(0, params, optimizer.init(params), fm.key(1))]

    def ours() -> Tensor:
        state = box[0]
        ctx = fm.Ctx(sh=sh, key=fm.fold_in(state.key, state.step))
        (value, _), grads = gradients(state.params, batch, ctx)
        params, _, opt = optimizer.update(state.params, grads, state.opt)
        box[0] = fm.TrainState(state.step + 1, params, opt, state.key)
        return value

    parts = [{n: t[half] for n, t in batch.items()} for half in (slice(0, 4), slice(4, 8))]
    theirs = peer_step(peer, parts)
    check_losses("own", ours, theirs)
    compared("own: examples/own_model.py", ours, theirs, pairs=max(a.pairs, 31), repeats=20, clock=a.clock)


IMPORTS = "import fmegatron.api, fmegatron.primitives, fmegatron.models, fmegatron.optim"


def imports(a: argparse.Namespace) -> None:
    """Seconds that importing takes beyond torch, each time in a process of its own, from bytecode, as installed (a first
    import writes it). (Without gc.freeze a walk of the collector over torch's own objects, 0.1 s, would fall into it by
    chance.)"""
    code = "import gc, time, torch; gc.collect(); gc.freeze(); start = time.process_time()"
    code = f"{code}; {IMPORTS}; print(time.process_time() - start)"
    env = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    runs = [subprocess.check_output([sys.executable, "-c", code], env=env) for _ in range(1 + max(7, a.pairs // 2))]
    found = [float(run) for run in runs[1:]]
    low, high = interval(found)
    print(f"{'import beyond torch':28} {statistics.median(found):9.3f} s   95 % of the median: {low:.3f} to {high:.3f}")


CASES = {"train": train, "host": host, "own": own, "import": imports}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {a.threads} thread(s), clock: {a.clock}; fmegatron, peer, their ratio", flush=True
    )
    for name in a.only:
        CASES[name](a)


if __name__ == "__main__":
    main()
