"""Multi-token prediction: against the paper's equations in float64, on layouts, planted defects, and what a run sees of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import fmegatron as fm
from fmegatron import tree
from fmegatron.checking import check, infer_over
from fmegatron.config import TrainConfig
from fmegatron.errors import UserError
from fmegatron.job_model import computations, model_config, resumed_model
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig, mtp
from fmegatron.models.config import config_from_dict, config_to_dict
from fmegatron.models.moe import MoE, load_metrics
from fmegatron.models.upcycle import upcycled
from fmegatron.parallel.pipeline_stage import find_ends, rank_entries
from fmegatron.parallel.routing import Routing
from fmegatron.parallel.stages import estimated_costs, even
from fmegatron.precision import Precision
from fmegatron.rules import standard_rules
from fmegatron.spec import count, params_of
from fmegatron.step import evaluate
from fmegatron.testing import Layout, assert_equivalent, make_batch
from fmegatron.testing.covering import Case
from fmegatron.testing.program import Program
from tests.mutants.catching import verdict
from tests.mutants.edits import applied
from tests.mutants.mtp_table import MTP_MUTANTS, TINY

F64 = torch.float64
CONFIG = TINY.config
SH = fm.Sharding(precision=Precision(params=F64))
IGNORE = -100


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def params():
    """Norms drawn too, so that none is trivially right."""
    return Program(TINY).params_of(TINY.spec(), F64)


def batch_of(kind: str = "packed", rows: int = 3, seq: int = 9) -> dict[str, Tensor]:
    return make_batch(CONFIG.vocab, rows, seq, mask="uneven", packed=kind == "packed", seed=3)


# ----------------------------------------------------------------------------- the paper's equations, in plain torch


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions of x[token … feature]."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x), dtype=F64)[:, None] / CONFIG.rope_base ** (torch.arange(half, dtype=F64) / half)
    cos, sin = (f(angle).view(len(x), *(1,) * (x.ndim - 2), half) for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def transformer_block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """x[token embed], one document."""
    h = rms(x, p["norm1"])
    q = turned(torch.einsum("te,ekgh->tkgh", h, p["q"]))
    k, v = turned(torch.einsum("te,ekh->tkh", h, p["k"])), torch.einsum("te,ekh->tkh", h, p["v"])
    scores = torch.einsum("tkgh,skh->kgts", q, k) / math.sqrt(CONFIG.head)
    ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    read = torch.einsum("kgts,skh->tkgh", scores.masked_fill(ahead, -math.inf).softmax(-1), v)
    x = x + torch.einsum("tkgh,kghe->te", read, p["o"])
    h = rms(x, p["norm2"])
    return x + (torch.nn.functional.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def documents(batch: dict[str, Tensor]):
    """(tokens, labels, what each counts by, does the row end with it?) of every document. Its last label is of the next document
    where the row goes on."""
    for row in range(len(batch["tokens"])):
        segments = batch["segments"][row] if "segments" in batch else torch.zeros_like(batch["tokens"][row])
        for n in segments.unique():
            (at,) = (segments == n).nonzero(as_tuple=True)
            yield *(batch[name][row, at] for name in ("tokens", "labels", "mask")), at[-1] == len(segments) - 1


def reference(params, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(the whole loss, each depth's mean)."""
    depths = CONFIG.mtp
    sums, numbers = [torch.zeros((), dtype=F64) for _ in range(depths + 1)], [0.0] * (depths + 1)
    for tokens, labels, counted, at_the_end in documents(batch):
        length = len(tokens)
        x = params["embed"][tokens]
        for p in params["layers"].values():
            x = transformer_block(p, x)
        h = rms(x, params["norm"])
        for depth in range(depths + 1):
            left = length - depth
            if left < 1:
                break
            if depth:  # (21), (22): of the tokens 1 … T - k alone
                p = params["mtp"][CONFIG.layers + depth - 1]
                embedded = params["embed"][tokens[depth:]]
                both = torch.cat([rms(embedded, p["embed_norm"]), rms(h[:left], p["hidden_norm"])], -1)
                h = rms(transformer_block(p, both @ p["join"]), p["norm"])
            logs = (h @ params["head"].T).log_softmax(-1)  # (23), (24)
            for i in range(left):
                target, weight = labels[i + depth], float(counted[i + depth])
                beyond = depth > 0 and i + depth == length - 1 and not at_the_end
                if target != IGNORE and not beyond:
                    sums[depth] = sums[depth] - weight * logs[i, target]
                    numbers[depth] += weight
    means = [s / n for s, n in zip(sums, numbers, strict=True)]
    names = ["lm", *(f"mtp_loss.{k}" for k in range(1, depths + 1))]
    return means[0] + CONFIG.mtp_weight / depths * sum(means[1:]), dict(zip(names, means, strict=True))


def ours(params, batch, microbatches: int = 1):
    f = fm.accumulate(TINY.loss, microbatches, weights=TINY.weights)
    (value, metrics), grads = f(params, batch, fm.Ctx(sh=SH))
    return value, metrics["terms"], grads


def off(params, batch) -> float:
    """The largest difference from the reference, of loss, each depth's loss and every gradient, relative to the gradients'."""
    leaves = {n: x.clone().requires_grad_() for n, x in tree.named(params).items()}
    want, means = reference(tree.like(params, list(leaves.values())), batch)
    grads = torch.autograd.grad(want, list(leaves.values()))
    value, terms, found = ours(params, batch)
    pairs = [(value, want), *((terms[n], means[n]) for n in means)]
    worst = max(float(abs(a - b.detach())) for a, b in pairs)
    for path, want_g, g in zip(leaves, grads, tree.leaves(found), strict=True):
        assert float(want_g.norm()) > 1e-6, path
        worst = max(worst, float((g - want_g).norm() / want_g.norm()))
    return worst


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_the_papers_equations(params, kind):
    assert off(params, batch_of(kind)) < 1e-12


def test_microbatches_do_not_matter(params):
    batch = batch_of()
    (a, _, ga), (b, _, gb) = ours(params, batch), ours(params, batch, 3)
    assert abs(a - b) < 1e-14
    assert all(torch.allclose(x, y, rtol=1e-12, atol=1e-15) for x, y in zip(*map(tree.leaves, (ga, gb)), strict=True))


def test_rows_shorter_than_the_modules_look(params):
    """… have no token that far: no loss, no gradient, nothing that is not a number."""
    batch = {n: x[:, :2] for n, x in batch_of("plain").items()}
    _, terms, grads = ours(params, batch)
    assert terms["mtp_loss.2"] == 0 < terms["lm"]
    assert all(g.isfinite().all() for g in tree.leaves(grads)) and not grads["mtp"][2]["join"].any()


# ------------------------------------------------------------------------------------------------------------ layouts

EXPERTS = Decoder(
    dataclasses.replace(
        CONFIG,
        moe=MoE(Routing(4, 2, scores="sigmoid", switch_loss=0.3, z_loss=0.01, expert_bias=True), 4, shared=4),
    )
)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (TINY, "cp=2,tp=2 sp micro=2 packed mask=uneven"),
        (TINY, "fsdp=2,cp=2 zero=3 context=ring odd remat=attention"),
        (EXPERTS, "dp=2,cp=2 ep=4 packed odd"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_layouts_are_equal(model, line):
    assert_equivalent(model, line, checks=("gradients",))


@pytest.mark.parametrize(
    "line",
    [
        "pp=1 micro=2 schedule=zbh1 packed mask=uneven",
        pytest.param("pp=2 micro=2 packed mask=uneven stages=Et|mmL", marks=pytest.mark.slow),
        pytest.param("pp=2,fsdp=2 zero=3 micro=2 schedule=zbv remat=attention", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_is_equal(line):
    """Modules are with the head, and the embedding is on both ends."""
    assert_equivalent(TINY, line, engine="processes", checks=("gradients",))


def test_what_each_stage_holds():
    ends = find_ends(TINY)
    assert ends.tied == ("embed",) and set(ends.back) == {"embed", "norm", "head", "mtp"}
    first, last = (rank_entries(TINY.spec(), [stage], ends) for stage in even(1, 2))
    assert set(first) == {"embed", "layers"} and set(last) == {"embed", "norm", "head", "mtp", "layers"}


@pytest.mark.parametrize("name", MTP_MUTANTS)
def test_a_mutant_is_caught(params, name):
    planted = MTP_MUTANTS[name]
    if planted.layout:
        text = "tests.mutants.mtp_table:TINY"
        assert (
            verdict(Case(text, Layout.parse(planted.layout)), ("gradients",), planted.mutant.edits).kind == "difference"
        )
        return
    with applied(planted.mutant.edits):
        assert off(params, batch_of()) > 1e-4


# ------------------------------------------------------------------------------------------------------------- experts


def test_modules_have_experts_where_the_last_layer_has():
    spec = EXPERTS.spec()
    assert {"router", "shared_gate", "join"} <= spec["mtp"][1].keys()
    moe = dataclasses.replace(EXPERTS.config.moe, dense_layers=(0,))
    assert "router" not in Decoder(dataclasses.replace(EXPERTS.config, moe=moe)).spec()["mtp"][1]


def test_experts_of_modules_are_balanced_and_counted():
    """What has no token further is not routed; losses of balance add up; the biases of the choice move by the load."""
    program = Program(EXPERTS)
    spec, batch = EXPERTS.spec(), batch_of("plain")
    params = program.params_of(spec, F64)
    (_, metrics), _ = fm.accumulate(EXPERTS.loss, 1, weights=EXPERTS.weights)(params, batch, fm.Ctx(sh=SH))
    stats, rows, seq = metrics["stats"], *batch["tokens"].shape
    assert stats["load"].sum() == 2 * rows * seq and stats["mtp"]["load"].sum() == 2 * rows * (2 * seq - 3)
    found = mtp.metrics(stats, EXPERTS.config)
    assert (
        set(found) == {f"{n}.{i}" for n in ("max_load", "balance", "router_z") for i in (1, 2)}
        and mtp.metrics(stats, CONFIG) == {}
    )
    each = load_metrics(stats, EXPERTS.config)["balance.0"] * seq
    each = each + found["balance.1"] * (seq - 1) + found["balance.2"] * (seq - 2)
    assert metrics["terms"]["balance"] == pytest.approx(float(each) / seq, rel=1e-12)
    moved = EXPERTS.update_params(params, stats, SH)
    for load, before, after in (
        (stats["load"][0], params["layers"][0], moved["layers"][0]),
        (stats["mtp"]["load"][1], params["mtp"][2], moved["mtp"][2]),
    ):
        step = 1e-3 * torch.sign(load.mean() - load)
        torch.testing.assert_close(after["expert_bias"] - before["expert_bias"], step.to(after["expert_bias"]))
        assert step.any()


# ------------------------------------------------------------------------------------------------------ what a run sees


def test_evaluation_is_the_main_loss_alone(params):
    batch = batch_of()
    with_modules, alone = (
        evaluate(m.loss, weights=m.weights, sh=SH)(params, batch)
        for m in (TINY, dataclasses.replace(TINY, config=dataclasses.replace(CONFIG, mtp_weight=0.0)))
    )
    assert set(alone) == {"lm"} and set(with_modules) == {"lm", "mtp_loss.1", "mtp_loss.2"}
    assert torch.equal(alone["lm"][0], with_modules["lm"][0])
    _, means = reference(params, batch)
    for name, (total, weight) in with_modules.items():
        assert float(total / weight) == pytest.approx(float(means[name]), rel=1e-12)


def test_logits_and_generation_do_without_modules(params):
    plain = Decoder(dataclasses.replace(CONFIG, mtp=0))
    rest = {n: p for n, p in params.items() if n != "mtp"}
    tokens = batch_of()["tokens"]
    assert torch.equal(TINY.logits(params, tokens), plain.logits(rest, tokens))
    assert params_of(plain.spec()).keys() == params_of({n: p for n, p in TINY.spec().items() if n != "mtp"}).keys()


def test_the_checking_mode_finds_what_gradients_are_summed_over(params):
    """… and no layout on which modules would be wrong."""

    class Bare(Decoder):
        def _module_spec(self, index):
            return {n: dataclasses.replace(p, over=None) for n, p in super()._module_spec(index).items()}

    def program(model):
        def loss(params, batch, sh):
            terms, _ = model.loss(params, batch, fm.Ctx(sh=sh))
            return sum(sh.sum(t.items, "batch seq ->") for t in terms.values())

        return loss

    batch = batch_of(rows=2, seq=8)
    mesh = make_mesh("dp=2,cp=2,tp=2", kv_heads=2, abstract=True, device="cpu")
    rules = standard_rules(mesh, sequence_parallel=True)
    check(program(TINY), TINY.spec(), params, batch, rules, probe=False)
    found = infer_over(program(Bare(CONFIG)), Bare(CONFIG).spec(), params, batch, rules)
    for (path, p), q in zip(params_of(TINY.spec()).items(), params_of(found).values(), strict=True):
        assert set(p.over.split()) == set(q.over.split()), path


@pytest.mark.slow
def test_compiled_modules_compute_the_same(params):
    batch, want = batch_of(), ours(params, batch_of())[2]
    compiled = dataclasses.replace(TINY, compile={"backend": "eager"}, save=fm.names("join"))
    got = fm.accumulate(compiled.loss, 1, weights=compiled.weights)(params, batch, fm.Ctx(sh=SH))[1]
    for a, b in zip(*map(tree.leaves, (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_the_settings_of_a_run():
    sizes = model_config(TrainConfig(mtp=2, mtp_weight=0.3), None)
    assert (sizes.mtp, sizes.mtp_weight) == (2, 0.3) and model_config(TrainConfig(), None).mtp == 0
    assert computations(sizes)[-1] == "join" and "join" not in computations(model_config(TrainConfig(), None))
    assert resumed_model(TrainConfig(mtp=2, mtp_weight=0.1), sizes, "there") == dataclasses.replace(
        sizes, mtp_weight=0.1
    )
    with pytest.raises(UserError, match=r"of another model, with mtp 2 \(now 1\)"):
        resumed_model(TrainConfig(mtp=1), sizes, "there")


def test_a_dense_model_is_upcycled_with_its_modules(params):
    """Equal experts compute what the dense part did, in modules too."""
    made, config = upcycled(params, CONFIG, Routing(4, 2, normalised=True), key=fm.key(0))
    batch = batch_of()
    model = Decoder(config)
    (value, metrics), _ = fm.accumulate(model.loss, 1, weights=model.weights)(made, batch, fm.Ctx(sh=SH))
    want, terms, _ = ours(params, batch)
    assert float(value) == pytest.approx(float(want), rel=1e-12)
    assert all(float(metrics["terms"][n]) == pytest.approx(float(x), rel=1e-12) for n, x in terms.items())


def test_sizes():
    plain = dataclasses.replace(CONFIG, mtp=0)
    e, block = CONFIG.embed, count(Decoder(plain).spec()["layers"])
    assert count(TINY.spec()) - count(Decoder(plain).spec()) == 2 * (block + 2 * e * e + 3 * e)
    one = {"layers": 1, "embed": e, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 8, "vocab": 24}
    costs, head = estimated_costs(**one, seq_len=8, mtp=2)
    assert 3 * (sum(costs) + head) == pytest.approx(TINY.flops_per_token(8))
    assert config_from_dict(config_to_dict(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mtp": -1}, "mtp=-1, the number of prediction modules, must be an int of 0 or more"),
        ({"mtp_weight": -0.1}, "mtp_weight=-0.1 must be a number of 0 or more"),
    ],
)
def test_what_means_nothing_is_refused(change, says):
    with pytest.raises(UserError, match=says):
        dataclasses.replace(CONFIG, **change)


def test_other_norms_and_places(params):
    """Layer norms with biases, learned positions, a tied table, norms behind the parts: gradients everywhere."""
    config = DecoderConfig(
        vocab=24,
        embed=8,
        layers=1,
        heads=2,
        mlp=8,
        mtp=1,
        norm="layer",
        positions="learned",
        tied=True,
        norm_place="both",
    )
    model = Decoder(config)
    params = Program(model).params_of(model.spec(), F64)
    f = fm.accumulate(model.loss, 1, weights=model.weights)
    _, grads = f(params, batch_of(), fm.Ctx(sh=SH))
    assert {"embed_norm_bias", "hidden_norm_bias", "norm_bias", "norm2_post"} <= grads["mtp"][1].keys()
    assert all(g.any() for path, g in tree.named(grads).items() if not path.endswith(".k_bias"))
