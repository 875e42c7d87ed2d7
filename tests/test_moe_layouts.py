"""Experts with other parts of the library: Muon, the ledger, filled-up batches, and DeepSeek's models on layouts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fmegatron as fm
from fmegatron.data.dataset import make_batch
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.optim.newton_schulz import newton_schulz
from fmegatron.parallel import dispatch
from fmegatron.parallel.routing import Routing
from fmegatron.precision import Precision
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import params_of
from fmegatron.testing import Layout, compare, ledger
from fmegatron.testing.models import small_model
from fmegatron.testing.program import Program

F64 = torch.float64
ROUTING = Routing(4, 2, normalised=True)


def model(routing=ROUTING, **changes):
    moe = MoE(routing, **{"mlp": 4, **changes})
    return Decoder(DecoderConfig(vocab=24, embed=8, layers=1, heads=4, mlp=8, kv_heads=2, head=4, moe=moe))


@pytest.mark.parametrize(
    ("family", "text"), [("deepseek_v3", "dp=2,tp=2 sp ep=4 micro=2"), ("deepseek_v2", "cp=2,tp=2 ep=2 zero=3")]
)
def test_deepseek_on_layouts(family, text):
    """Latent attention, a dense first layer, groups of experts, biases of the choice, a shared expert."""
    result = compare(small_model(family), Layout.parse(text), checks=("gradients",))
    assert result.ok, result.worst


# ---------------------------------------------------------------------------------------------------------------- Muon


def muon_step(m, params, grads, spec):
    labels = fm.optim.muon_labels(spec)
    optimizer = fm.optim.partition(
        labels, {"muon": fm.optim.muon(0.1, spec=spec, weight_decay=0.0), "adamw": fm.optim.adamw(0.1)}
    )
    return optimizer.update(params, grads, optimizer.init(params))[0]


def test_muon_makes_each_experts_matrix_orthogonal_by_itself():
    """A leaf's step is, of every expert (gate and up apart), that of its matrix alone; on ranks that hold parts of them too."""
    m, g = model(), torch.Generator().manual_seed(0)
    spec = m.spec()
    params, grads = (fm.tree.tree_map(lambda p: torch.randn(p.shape, generator=g, dtype=F64), spec) for _ in range(2))
    found = muon_step(m, params, grads, spec)
    for name, change in (("experts_gate_up", (0, 2, 1, 3)), ("experts_down", (0, 1, 2))):
        p, u, new = (t["layers"][0][name].permute(change) for t in (params, grads, found))
        p, u, new = (t.reshape(-1, *t.shape[-2:]) for t in (p, u, new))
        for one, step, after in zip(p, u, new, strict=True):
            factor = max(1.0, one.shape[1] / one.shape[0]) ** 0.5
            want = one - 0.1 * factor * newton_schulz((0.05 + 0.95 * 0.05) * step[None])[0]
            assert (after - want).norm() <= 1e-12 * want.norm(), name
    program, layout = Program(m), Layout.parse("dp=2,tp=2 ep=2 etp=2")
    with simulate(4):
        sh = program.sharding(layout, Precision(params=F64))
        whole = muon_step(m, sh.shard_params(params, spec), sh.shard_params(grads, spec), spec)
        for name, p in fm.tree.named(whole).items():
            want = fm.tree.named(found)[name]
            for full in per_rank(p.full_tensor()):
                assert (full - want).norm() <= 1e-12 * want.norm(), name


# -------------------------------------------------------------------------------------------------------------- ledger


@pytest.mark.parametrize(
    ("text", "capacity"), [("dp=4 ep=4", None), ("dp=4 ep=4", 0.5), ("dp=2,tp=2 ep=2 etp=2", None)]
)
def test_the_ledger_counts_routed_rows_alone(text, capacity):
    """Of an even choice: forward there and back, and both again in the backward, k rows a token and not one more (half of them
    where half find a place); weights go there, and their gradients back. Ranks with the same tokens move them each."""
    m = model(dataclasses.replace(ROUTING, force="balanced", capacity=capacity, drop="position"))
    layout, program = Layout.parse(text), Program(m)
    found = ledger(m, text, part="gradients", precision=Precision(params=F64))
    rows, seq = program.batch_of(layout)["tokens"].shape
    each = rows * seq // layout.size("dp") * ROUTING.top_k
    if capacity is not None:  # of a sequence an expert takes so many
        each = rows // layout.world * 4 * -(-seq * ROUTING.top_k // 8)
    moved = sum(e.bytes for e in found.entries if e.kind == "all-to-all")
    assert moved == 8 * (each * (4 * 8 + 2) + 4)  # and the 4 experts' numbers of rows


@pytest.mark.parametrize(("k", "rows_first"), [(1, True), (2, True), (3, False)])
def test_a_row_goes_to_the_parts_of_its_expert_by_the_shorter_way(k, rows_first, monkeypatch):
    """Experts on two ranks, the width of each on two, other tokens on all four: a rank's k rows a token go over ep, and once more
    to either part; or tokens are gathered over etp first, and the rows of twice as many go over ep."""
    m = model(Routing(4, k, normalised=k > 1, force="balanced"))
    text, options = "dp=2,tp=2 sp ep=2 etp=2", {"part": "gradients", "precision": Precision(params=F64)}
    found = ledger(m, text, **options).entries
    rows, seq = Program(m).batch_of(Layout.parse(text))["tokens"].shape
    # numbers of a row: there and back, forward and backward, and of its weight
    over_ep = rows * seq // 4 * k * (4 * 8 + 2)
    bytes_of = {e.axes: e.bytes for e in found if e.kind == "all-to-all"}
    if rows_first:  # and numbers of rows: over ep those of 4 experts, over etp of 2 from 2 ranks, a copy for each rank
        assert bytes_of == {("dp",): 8 * (over_ep + 4), ("tp",): 8 * (2 * over_ep + 8)}
    else:
        assert bytes_of == {("dp",): 8 * (2 * over_ep + 4)}
    monkeypatch.setattr(dispatch, "_rows_first", lambda *_: not rows_first)
    other = ledger(m, text, **options).entries
    if k != 2:  # ep, where both are as many but for weights
        assert sum(e.sent for e in found) < sum(e.sent for e in other)


# -------------------------------------------------------------------------------------------------- what fills up a batch


def test_rows_that_fill_up_the_last_batch_are_not_routed():
    """Rows behind the last sample are told apart from tokens, also in the count of what experts get."""
    samples = [torch.arange(9).numpy() + i for i in range(3)]

    def sample(index):
        return samples[index] if index < 3 else samples[0][:0]

    m = model(dataclasses.replace(ROUTING, group="batch", switch_loss=0.1, z_loss=0.1, capacity=0.8))
    params = fm.init(m.spec(), fm.key(0), sh=fm.Sharding(precision=Precision(params=F64)))
    results = []
    for rows in (3, 5):
        batch = make_batch(sample, 0, seq_len=8, batch_size=rows, filled=rows > 3)
        f = fm.accumulate(m.loss, weights=m.weights)
        (value, metrics), _ = f(params, batch, fm.Ctx(sh=fm.Sharding(precision=Precision(params=F64))))
        results.append((value, metrics["stats"]["load"], metrics["weights"]["balance"]))
        assert metrics["stats"]["load"].sum() == 3 * 8 * 2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_leaves_of_experts_are_matrices():
    spec = params_of(model(bias=True, router_bias=True).spec())
    labels = fm.optim.muon_labels(model(bias=True, router_bias=True).spec())
    found = {n.rsplit(".", 1)[-1] for n, label in fm.tree.named(labels).items() if label == "muon" and "expert" in n}
    assert found == {"experts_gate_up", "experts_down"} and "layers.0.experts_down_bias" in spec
