"""Defects of mixtures of experts, each as a small edit of this library: real frameworks shipped them or easily might.

None changes a shape or a dtype, and none is seen on one device: each makes a number wrong on the layout that is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.parallel.routing import Routing
from tests.mutants.table import Mutant, mutant

ROUTING = Routing(4, 2, normalised=True, switch_loss=0.5, z_loss=0.01)


def _model(routing: Routing = ROUTING, **changes: object) -> Decoder:
    moe = MoE(routing, **{"mlp": 4, "shared": 4, **changes})  # type: ignore[arg-type]
    return Decoder(DecoderConfig(vocab=24, embed=8, layers=1, heads=4, mlp=8, kv_heads=2, head=4, moe=moe))


# as `find_model` reads them: "tests.mutants.moe_table:PLAIN"
PLAIN = _model()
CAPACITY = _model(replace(ROUTING, capacity=0.7, drop="position"), shared=0)
BATCH = _model(replace(ROUTING, group="batch"), shared=0)
BATCH_CAPACITY = _model(replace(ROUTING, group="batch", capacity=0.7), shared=0)
BIASES = _model(bias=True, router_bias=True, shared=0)
MOVING = _model(replace(ROUTING, scores="sigmoid", expert_bias=True, bias_rate=0.1), shared=0)


@dataclass(frozen=True)
class Planted:
    """A defect, the model of this module and the layout that show it."""

    mutant: Mutant
    layout: str
    model: str

    @property
    def text(self) -> str:
        """The model as `find_model` reads it."""
        return f"{__name__}:{self.model}"


def planted(
    name: str, bug: str, *edits: tuple[str, str, str], on: str, model: str = "PLAIN", checks: tuple[str, ...] = ()
) -> Planted:
    return Planted(mutant(name, bug, *edits, checks=checks), on, model)


DISPATCH, ROUTES, LOSSES = (
    "fmegatron.parallel.dispatch",
    "fmegatron.parallel.routing",
    "fmegatron.parallel.routing_losses",
)
EXPERTS, LAYER, RECORDS = "fmegatron.parallel.experts", "fmegatron.parallel.moe", "fmegatron.models.moe"
EXCHANGE, RULES, DECODER = "fmegatron.exchange", "fmegatron.rules", "fmegatron.models.decoder"
ROWS = '"batch seq* route -> batch route"'
SEQ_RANKS = "(1 if sh.mesh is None else sh.mesh.size(sh.axes('seq*')))"

AUXILIARY = (
    planted(
        "the auxiliary loss is scaled by tp",
        "Megatron #1652, #3672: every rank of the sequence adds the loss of the whole of it",
        (f"{LOSSES}:switch_loss", f"sh.sum(of_one, {ROWS})\n", f"sh.sum(of_one, {ROWS}) * {SEQ_RANKS}\n"),
        on="tp=2 sp",
    ),
    planted(
        "the auxiliary loss counts a rank's own tokens",
        "Megatron #1652, NeMo Automodel PR #3359: shares of the load by local counts",
        (f"{LOSSES}:counts_by_score", f"sh.sum(taken, {ROWS})", "taken.sum(1)"),
        on="cp=2",
    ),
    planted(
        "the auxiliary loss is divided by a rank's own tokens",
        "NeMo Automodel PR #3359: it grows with the ranks of the sequence",
        (
            f"{LOSSES}:switch_loss",
            "tokens = mine.sum(-1) / routing.top_k",
            "tokens = mine.sum(-1) / routing.top_k / " + SEQ_RANKS,
        ),
        on="tp=2 sp",
    ),
    planted(
        "the auxiliary loss is weighed by a rank's own tokens",
        "the same in its weight: it shrinks with the ranks of the sequence",
        (f"{RECORDS}:add_records", 'sh.sum(real.detach(), "batch seq* -> batch")', "real.detach().sum(1)"),
        on="cp=2",
    ),
    planted(
        "the auxiliary loss is reported once a microbatch",
        "Megatron's log line adds up the means of the microbatches",
        (
            "fmegatron.accumulate:Sums.__init__",
            "self.total: Any = None",
            "self.total, self.number = None, microbatches",
        ),
        (
            "fmegatron.accumulate:Sums.finish",
            "s * as_factor(reciprocal(scale[name][0]), s)",
            "s * as_factor(reciprocal(scale[name][0]), s) * self.number",
        ),
        on="dp=2 micro=2",
    ),
    planted(
        "the router's z-loss has padding in it",
        "tokens that fill up a part have logits too",
        (f"{RECORDS}:add_records", "z_loss(routed.logits, routed.mask)", "z_loss(routed.logits)"),
        on="dp=1,cp=2 odd",
    ),
)
# of a group that is the whole batch, read in two passes
WHOLE_BATCH = (
    planted(
        "the switch loss of the batch goes by a microbatch's load",
        "Megatron's auxiliary loss is one of each microbatch, whatever the batch",
        (
            f"{RECORDS}:_counts",
            "            return known\n",
            '            return ctx.sh.sum(mine, "batch route -> route")\n',
        ),
        on="dp=1 micro=2",
        model="BATCH",
    ),
    planted(
        "the first pass counts a rank's own rows",
        "Megatron #1652 again: shares of the load by local counts",
        (
            "fmegatron.models.two_passes:_statistics",
            "summed(t.items, t.dims, ctx.sh)",
            "t.items.sum(1 if t.items.ndim > 1 else 0)",
        ),
        on="dp=2 micro=2",
        model="BATCH",
    ),
    planted(
        "what was dropped is not replayed",
        "the second pass has the choices of the first, and not which of them found a place",
        ("fmegatron.parallel.routing_record:replayed", "record >= 0", "record >= -(10**9)"),
        on="dp=1 micro=2",
        model="BATCH_CAPACITY",
    ),
)
ROUTER = (
    planted(
        "the router's gradient misses its partial sum",
        "torchtitan #4054: 1.2 to 2.7 times too small, a layout of gradients that only expert parallelism sets",
        (
            f"{DISPATCH}:dispatched",
            'sh(weights, f"batch seq* choice -> {tokens} choice | {partial}")',
            'sh(weights, f"batch seq* choice -> {tokens} choice")',
        ),
        on="tp=2",
    ),
    planted(
        "padding is routed",
        "it is counted, and takes places of an expert's capacity",
        (f"{LAYER}:router", "mask, bias = real_tokens(ctx, x.shape), ", "mask, bias = None, "),
        on="cp=2 odd",
        model="CAPACITY",
    ),
    planted(
        "capacity in the order of the ranks' own tokens",
        "each rank counts from its first token: which are dropped depends on the layout",
        (
            f"{ROUTES}:_within_capacity",
            "        places = there.cumsum(1) - there\n",
            f"        n = {SEQ_RANKS}\n"
            "        there = there.unflatten(1, (n, -1)).transpose(1, 2).flatten(1, 2)\n"
            "        places = (there.cumsum(1) - there).unflatten(1, (-1, n)).transpose(1, 2).flatten(1, 2)\n",
        ),
        on="tp=2 sp",
        model="CAPACITY",
    ),
    planted(
        "capacity of a rank's own tokens",
        "Megatron's capacity is of the tokens that a rank has: with sequence parallelism fewer find a place",
        (
            f"{ROUTES}:_group_tokens",
            'tokens = global_size(sh, "seq*", like.shape[1])',
            "tokens = like.shape[1]",
        ),
        on="tp=2 sp",
        model="CAPACITY",
    ),
)
EXPERT = (
    planted(
        "expert gradients are not summed over their replicas",
        "DeepSpeed PR #5259, megablocks PR #20: those of edp are left out",
        (f"{RULES}:_expert_rows", '"batch\'": before(batch, expert + emlp)', '"batch\'": ()'),
        (f"{DISPATCH}:dispatched", "    if beyond:\n", "    if False:\n"),
        on="dp=4 ep=2",
    ),
    planted(
        "expert gradients are not summed over the sequence",
        "the same for cp, over which experts have replicas too",
        (f"{RULES}:_expert_rows", '"seq\'": before(seq, expert + emlp)', '"seq\'": ()'),
        (f"{DISPATCH}:dispatched", "    if beyond:\n", "    if False:\n"),
        on="cp=2",
    ),
    planted(
        "expert gradients are not summed over axes behind those of the experts",
        "of a mesh whose axes come in another order than its dims': experts' replicas lie between the ranks of the batch",
        (f"{DISPATCH}:dispatched", "    if beyond:\n", "    if False:\n"),
        on="fsdp=2,dp=2 ep=2",
    ),
    planted(
        "expert gradients are summed over ranks with the same tokens",
        "of that mesh with parts of experts in place of experts: tokens have been gathered over the axis",
        (f"{DISPATCH}:_beyond", "if a in lie - said", "if a not in said"),
        on="fsdp=2,dp=2 etp=2",
    ),
    planted(
        "expert gradients are ep times too large",
        "pytorch #160285, megablocks PR #86: summed over the expert ranks a second time; the loss shows nothing",
        (
            f"{DISPATCH}:dispatched",
            "            return experts(rows, weights, ends, leaves, sh=sh)\n",
            "            k = ranks.travelling\n"
            "            grown = {n: v * k - v.detach() * (k - 1) for n, v in leaves.items()}\n"
            "            return experts(rows, weights, ends, grown, sh=sh)\n",
        ),
        on="dp=2 ep=2",
    ),
    planted(
        "gradients are averaged over ep on their way back",
        "DeepSpeed PR #5259: divided by the expert ranks, of which one has each token",
        (
            f"{EXCHANGE}:_Exchange.backward",
            "ctx.splits.back, *some)",
            "ctx.splits.back, *(g / ctx.mesh.size(ctx.axes) for g in some))",
        ),
        on="dp=2 ep=2",
    ),
    planted(
        "the gradient of an expert's input misses its partial sum",
        "torchtitan #1805, #1878: a bare to_local in front of the experts",
        (
            f"{DISPATCH}:dispatched",
            'way(x, f"batch seq* embed -> {tokens} embed | {partial}")',
            'way(x, f"batch seq* embed -> {tokens} embed")',
        ),
        on="tp=2",
    ),
    planted(
        "experts' bias is added on every rank of etp",
        "a row-parallel product's bias, once too often for each further rank",
        (f"{EXPERTS}:mlp_experts", 'bias if not sh.axes("emlp") else bias * _first(sh, y)', "bias"),
        on="dp=2 etp=2",
        model="BIASES",
    ),
    planted(
        "the shared expert's gradient is counted twice",
        "it is reduced with the other experts' and again by its own layer",
        (
            f"{DECODER}:Decoder._experts",
            "            y = self._feed_forward(p, x, ctx, SHARED)\n",
            "            y = self._feed_forward(p, x, ctx, SHARED)\n"
            "            n = 1 if ctx.sh.mesh is None else ctx.sh.mesh.size(ctx.sh.axes('shared_mlp'))\n"
            "            y = y * n - y.detach() * (n - 1)\n",
        ),
        on="tp=2 sp",
    ),
)
TRAVEL = (
    planted(
        "weights of another token's choice",
        "rows are sorted by expert where they arrive, and their weights are not",
        (
            f"{DISPATCH}:_by_rows",
            "taken, scales = (gather_rows(t, there, back, 1) for t in came)",
            "taken, scales = gather_rows(came[0], there, back, 1), came[1]",
        ),
        on="dp=2 ep=2",
    ),
    planted(
        "rows go back in the order of experts",
        "the way back takes them for being in the order in which they came",
        (
            f"{DISPATCH}:_by_rows",
            "y = gather_rows(experts(taken, scales[:, 0], ends), back, there, 1)",
            "y = experts(taken, scales[:, 0], ends)",
        ),
        on="dp=2 ep=2",
    ),
    planted(
        "the summands of a row from parts of its expert are averaged",
        "as a mean over the ranks of etp would: each has the product of its part of the width",
        (f"{DISPATCH}:_by_rows", "among.back), *copies, n)", "among.back), *copies, n) / n"),
        on="dp=2,tp=2 sp ep=2 etp=2",
    ),
    planted(
        "of rows for parts of an expert each rank sends the first as often as there are ranks",
        "copies of a row in place of the rows, in the order of the ranks' own",
        (f"{DISPATCH}:_Ranks.copies", "(at + 0 * to[:, None]) * n", "(at * 0 + 0 * to[:, None]) * n"),
        on="dp=2,tp=2 sp ep=2 etp=2",
    ),
    planted(
        "ranks of the experts' group in another order",
        "a group's ranks by the order of the axes' names in place of the mesh's: rows meet another rank's experts",
        (f"{DISPATCH}:_Ranks.key", "in mesh.sorted(self.held):", "in reversed(mesh.sorted(self.held)):"),
        on="dp=2,tp=2 sp ep=4",
    ),
    planted(
        "experts on ranks with the same tokens are not added up",
        "with tensor parallelism and no sequence parallelism each rank has its own experts' summand alone",
        (f"{DISPATCH}:dispatched", '"expert\' emlp"', '"emlp"'),
        on="tp=2 ep=2",
    ),
)
# of the biases of the choice, after a step that moves them
MOVED = (
    planted(
        "the bias of the choice moves by a rank's own rows",
        "torchtitan #4154: counts are not reduced over the ranks of the batch",
        (f"{RECORDS}:record_terms", '"layer batch route -> layer route"', '"layer all_rows route -> layer route"'),
        on="dp=4",
        model="MOVING",
    ),
)
MOE_MUTANTS = {p.mutant.name: p for p in (*AUXILIARY, *WHOLE_BATCH, *ROUTER, *EXPERT, *TRAVEL)}
BIAS_MUTANTS = {p.mutant.name: p for p in MOVED}
