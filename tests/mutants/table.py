"""The mutants: defects that real frameworks shipped, each as a small edit of this library.

None changes a shape or a dtype, none is seen on one device, and on some layout that is drawn by default each makes a
number wrong: no exception, nothing that is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutants.edits import Edit


@dataclass(frozen=True)
class Mutant:
    """A defect. bug: what it is modelled on. checks: what finds it at its first layout, beside the gradients of one
    step, loss and norms, which are always compared."""

    name: str
    bug: str
    edits: tuple[Edit, ...]
    checks: tuple[str, ...] = ()


def mutant(name: str, bug: str, *edits: tuple[str, str, str], checks: tuple[str, ...] = ()) -> Mutant:
    return Mutant(name, bug, tuple(Edit(*e) for e in edits), checks)


ACCUMULATE, BUCKETS, COLLECTIVES = "fmegatron.accumulate", "fmegatron.buckets", "fmegatron.collectives"
CONTEXT, RING, STACK = "fmegatron.parallel.context", "fmegatron.parallel.ring", "fmegatron.parallel.stack"
CROSS_ENTROPY, DROPOUT = "fmegatron.primitives.cross_entropy", "fmegatron.primitives.dropout"
DECODER, NORM, CLIP = "fmegatron.models.decoder", "fmegatron.optim.norm", "fmegatron.optim.clip"
SHARDING, ZERO, ZIGZAG, PADDING = "fmegatron.sharding", "fmegatron.zero", "fmegatron.zigzag", "fmegatron.padding"

DATA_PARALLEL = (
    mutant(
        "gradients divided by dp twice",
        "torchtitan #2318, #2323: replicated gradients divided again after the loss moved to global tokens; Adam hides it",
        (f"{ZERO}:Reducer.wait", "self.take(i, x)", 'self.take(i, x / self.sh.mesh.size(self.sh.axes("batch")))'),
    ),
    mutant(
        "sum over dp counted twice under ZeRO-3",
        "pytorch #160285 (a reduction counted twice), #155903 (a factor that means another thing for FSDP and for HSDP)",
        (
            f"{STACK}:sharded_store",
            "zip(rows, arrive(), strict=True)",
            'zip(rows, [x * (sh.mesh.size(sh.axes("batch")) if what == "leave" else 1) for x in arrive()], strict=True)',
        ),
    ),
    mutant(
        "replicas of hybrid sharding not summed",
        "torchtitan #2318, pytorch #155903: of HSDP's two reductions one is missing or scaled alone",
        (
            f"{SHARDING}:Sharding._plan_optimizer",
            'if t == "I" and target',
            # of what the store cuts, on the data axes that are not the store's
            'if t == "I" and not (a in ("dp", "fsdp", "cp") and any('
            'b in self.mesh.expand(self.rules.store) for b, s in source.items() if s not in ("I", "R"))) and target',
        ),
    ),
    mutant(
        "only the last microbatch's gradient survives",
        "open-instruct PR #1498: the accumulator is reset at every backward",
        (f"{ACCUMULATE}:_add_in_place", "grads[i].add_(g)", "grads[i].copy_(g)"),
    ),
    mutant(
        "microbatches as a moving average",
        "torchtitan #1732: gradients scaled at every accumulation, so that the sum decays",
        (f"{ACCUMULATE}:_add_in_place", "grads[i].add_(g)", "grads[i].mul_(0.5).add_(g)"),
    ),
    mutant(
        "last microbatch added behind the reduction",
        "DeepSpeed PR #7985: replicas differ by their own last gradient",
        (f"{ACCUMULATE}:_add_in_place", "    seen = [False]", "    late: dict[int, Any] = {}\n    seen = [False]"),
        (
            f"{ACCUMULATE}:_add_in_place",
            "            grads[i] = g.to(torch.promote_types(g.dtype, dtype))\n",
            "            grads[i] = g.to(torch.promote_types(g.dtype, dtype))\n"
            "            if i in late and late[i].shape == g.shape:\n"
            "                grads[i] = grads[i] + late.pop(i)\n",
        ),
        (
            f"{ACCUMULATE}:_add_in_place",
            "            if not each:\n                add(i, g)\n",
            "            if not each and reducer is not None and grads[i] is not None and not reduce[1].rules.store:\n"
            "                late[i] = g\n"
            "            elif not each:\n                add(i, g)\n",
        ),
    ),
    mutant(
        "a buffer is reused before its reduction under ZeRO-2",
        "DeepSpeed #7718: norm two to three times too small, loss alike at first",
        (
            f"{ACCUMULATE}:_add_in_place",
            "dtype)), grads[i]) if each else (grads[i]",
            "dtype)), None) if each else (grads[i]",
        ),
    ),
    mutant(
        "a gradient is read before its reduction",
        "DeepSpeed #7718, #7898: nobody waits for what is under way, and what stands for it is taken",
        (f"{ZERO}:Ahead._awaited", "None if reduced is None else reduced()", "None"),
    ),
    mutant(
        "every microbatch reduces the running sum",
        "accelerate #3762: no_sync still synchronises; here what was reduced is reduced again",
        (f"{ACCUMULATE}:accumulate", "reduce = late and (", "reduce = late and (True or "),
    ),
    mutant(
        "gradients of a step are never zeroed",
        "DeepSpeed #7837: stage 0 in bf16 adds each step's gradients to the last one's",
        (
            f"{ACCUMULATE}:accumulate",
            "        return (total, metrics), as_at_rest(grads, at_rest)\n",
            "        if ctx.sh.mesh is not None and ctx.sh.mesh.world > 1:\n"
            "            older = run.__dict__.get('older') or [None] * len(grads)\n"
            "            grads = [g if o is None else g + o for g, o in zip(grads, older, strict=True)]\n"
            "            run.__dict__['older'] = grads\n"
            "        return (total, metrics), as_at_rest(grads, at_rest)\n",
        ),
        checks=("sgd",),
    ),
    mutant(
        "leaves of one size change places in a bucket",
        "DeepSpeed PR #545, pytorch #129206: gradients of a bucket taken apart in another order than they went in",
        (
            f"{BUCKETS}:Moving._take",
            "        for i, step, shape, part in zip(",
            "        alike = [[j for j, m in enumerate(sizes) if m == n][::-1] for n in sizes]\n"
            "        parts = [parts[same[sizes[:j].count(n)]] for j, (n, same) in enumerate(zip(sizes, alike, strict=True))]\n"
            "        for i, step, shape, part in zip(",
        ),
    ),
    mutant(
        "sums over ranks in float32",
        "Megatron-LM's reduce-scatter in the wire's dtype, torchtitan #2575: a cast that was to be wide is not",
        (f"{ZERO}:moving", "            dtype = sh.reduce_dtype(p)", "            dtype = torch.float32"),
    ),
    mutant(
        "a rank reads the layer that was gathered ahead",
        "Megatron-LM #7452: layers keyed by another number than the global one; weights of another layer after a gather",
        (f"{STACK}:_Layers.again", "self.gathers.pop(n)", "self.gathers.get(n - 1) or self.gathers.pop(n)"),
    ),
    mutant(
        "stale weights after the gather",
        "accelerate #3835, DeepSpeed: what was gathered in the first step is read in all that follow",
        (
            f"{STACK}:sharded_store",
            "            arrive = moving([flat[i] for i in rows], [params[i] for i in rows], sh, what)\n",
            "            arrive = moving([flat[i] for i in rows], [params[i] for i in rows], sh, what)\n"
            "            if what == 'enter' and sh.mesh is not None and sh.rules.store:\n"
            "                arrive = sh._plans.setdefault(('stale', index), arrive)\n",
        ),
        checks=("sgd",),
    ),
    mutant(
        "the last bucket of updated weights is not gathered back",
        "accelerate #3835: the optimizer updates a copy that the model does not read",
        (
            f"{ZERO}:_returned",
            "        out[rows[i]] = leaves.holder_of",
            "        out[rows[i]] = before[rows[i]] if i + 1 == len(rows) else leaves.holder_of",
        ),
    ),
    mutant(
        "moments matched to parameters by flat order",
        "nanotron #37, torchtitan #2227: optimizer state of one leaf goes to another of its shape",
        (
            f"{ZERO}:with_sharded_state",
            "        new, _, state = optimizer.update(mine, parts, state, donate",
            "        def swapped(x: Any) -> Any:\n"
            "            flat, kind = tree.leaves(x), [(tuple(t.shape), t.placements) for t in tree.leaves(mine)]\n"
            "            pairs = [[j for j, m in enumerate(kind) if m == n][::-1][kind[:i].count(n)] for i, n in enumerate(kind)]\n"
            "            return tree.like(x, [flat[j] for j in pairs])\n\n"
            "        state = {n: {**s, 'm': swapped(s['m'])} if 'm' in s else s for n, s in state.items()}\n"
            "        new, _, state = optimizer.update(mine, parts, state, donate",
        ),
        checks=("adamw",),
    ),
    mutant(
        "shards on one dim in the wrong order",
        "pytorch #129206, #129229: FSDP over TP on one dimension, nesting lost",
        (f"{SHARDING}:Sharding.shard_param", "self.positions(held, ", "self.positions(tuple(reversed(held)), "),
    ),
    mutant(
        "initial values depend on the placement",
        "pytorch #168058, SmolLM3: every shard draws from the start of the same stream",
        (
            f"{SHARDING}:Sharding.stored_index",
            "self.positions(by, n, name) if",
            "(at := self.positions(by, n, name)) - at[:1] if",
        ),
        checks=("init",),
    ),
)

LOSS = (
    mutant(
        "mean of the microbatches' means",
        "transformers #34191, #34242: each microbatch divided by its own tokens",
        (
            f"{ACCUMULATE}:accumulate",
            "                return evaluate(terms, stats, known, scale, ",
            "                mine = scale\n"
            "                if weights is not None and len(parts) > 1:\n"
            "                    own = scales(dict(weights(part)), ctx.sh)\n"
            "                    mine = {n: (w, c / len(parts)) for n, (w, c) in own.items()}\n"
            "                return evaluate(terms, stats, known, mine, ",
        ),
    ),
    mutant(
        "mean of the ranks' means",
        "verl #5625, torchtitan #2206: ranks with fewer tokens weigh more",
        (
            f"{ACCUMULATE}:Scales.__init__",
            "_counted(w.items, w.dims, sh) for",
            "(_counted(w.items, w.dims, sh) if sh.mesh is None else _Summand(w.items.long().sum() * sh.mesh.size("
            '(*sh.axes("batch"), *sh.axes("seq"))))) for',
        ),
    ),
    mutant(
        "loss times cp",
        "Megatron-LM #673, #906: loss scaled by cp against an average over dp x cp that is no longer there",
        (
            f"{ACCUMULATE}:evaluate",
            "scaled(s, scale[name][1], loss_scale) for",
            'scaled(s, scale[name][1] * (1 if sh.mesh is None else sh.mesh.size(sh.axes("seq"))), loss_scale) for',
        ),
    ),
    mutant(
        "the division is forgotten on one backend",
        "miles PR #3231: a token sum where the other backend has a mean",
        (
            f"{ACCUMULATE}:evaluate",
            "parts = [scaled(s, scale[name][1], loss_scale) for",
            "whole = sh.mesh is not None and sh.rules.store and sh.rules.zero == 3\n"
            "        parts = [s * 1.0 if whole else scaled(s, scale[name][1], loss_scale) for",
        ),
    ),
    mutant(
        "a microbatch of padding counts a token",
        "Megatron-LM #1764, transformers #34242: its weight of 0 is clamped to 1",
        (
            f"{ACCUMULATE}:accumulate",
            "        scale = None if known is None else scales(known, ctx.sh)\n",
            "        def clamped(x: Any) -> Any:\n"
            "            first = torch.zeros_like(x[:1]).flatten().index_fill(0, torch.tensor([0]), 1).view_as(x[:1])\n"
            "            cut = torch.tensor_split(x, len(parts))\n"
            "            return torch.cat([torch.cat([torch.where(p.any(), p[:1], first), p[1:]]) for p in cut])\n\n"
            "        counted = known\n"
            "        if known is not None and len(parts) > 1:\n"
            "            counted = {n: Weight(clamped(w.items), w.dims, w.coefficient) for n, w in known.items()}\n"
            "        scale = None if known is None else scales(counted, ctx.sh)\n",
        ),
    ),
    mutant(
        "tokens that do not count are in the weight",
        "Megatron-LM PR #7207, transformers #34191: a sum of masked losses over the number of all tokens",
        (
            f"{ACCUMULATE}:Scales.__init__",
            "_counted(w.items, w.dims, sh) for",
            "_counted(torch.ones_like(w.items) if sh.mesh is not None and sh.mesh.world > 1 else w.items, w.dims, sh) for",
        ),
    ),
    mutant(
        "padding rows in the loss",
        "torchtitan #2206, Megatron-LM PR #7207: rows that fill up a batch have labels that count",
        (f"{PADDING}:shard_batch", "{**FILLING, **", '{**FILLING, "labels": 0, **'),
    ),
    mutant(
        "the loss that is logged is the last microbatch's",
        "transformers #35203, torchtitan #2366: the value, not its gradient, is off by the accumulation",
        (f"{ACCUMULATE}:Sums._both", "_Summand(a.x + b.x, b.steps)", "_Summand(b.x, b.steps)"),
    ),
    mutant(
        "label smoothing by the local vocabulary",
        "Megatron-LM #7452: smoothing divided by the entries that a rank holds",
        (f"{CROSS_ENTROPY}:linear_cross_entropy", "z_loss, softcap, vocab_size)\n", "z_loss, softcap, vocab)\n"),
    ),
    mutant(
        "z-loss times tp",
        "Megatron-LM PR #5047, #1652: an auxiliary loss that every tensor-parallel rank adds",
        (f"{CROSS_ENTROPY}:_loss", "z_loss * lse.square()", "z_loss * (vocab_size // vocab) * lse.square()"),
    ),
    mutant(
        "what fills up the vocabulary is in the softmax",
        "Megatron-LM #1754: a vocabulary that does not divide over the ranks",
        (f"{CROSS_ENTROPY}:_hidden", "    if filling is None:", "    if filling is None or filling is not None:"),
    ),
    mutant(
        "an all-reduce overwrites its input",
        "Megatron-LM #7452, PR #7481: what each rank had is read again after the reduction",
        (
            f"{COLLECTIVES}:all_reduce",
            "return functional.wait_tensor(functional.all_reduce(x.contiguous(), op, mesh.group(axes)))",
            "x.data.copy_(functional.wait_tensor(functional.all_reduce(x.contiguous(), op, mesh.group(axes))))\n    return x",
        ),
        (
            f"{SHARDING}:Sharding.max",
            "y = x.detach().amax(gone) if gone else x.detach()\n            axes",
            "y = x.detach()[..., 0]\n            axes",
        ),
    ),
)

TENSOR = (
    mutant(
        "norm weights not summed under sequence parallelism",
        "Megatron-LM #1446, #7452: gradients of what is used alike on tp stay each rank's own",
        (
            f"{SHARDING}:Sharding._over",
            "for n in parse_side(param.over).dims for a in",
            'for n in parse_side(param.over.replace("*", "")).dims for a in',
        ),
    ),
    mutant(
        "replicated key and value heads not summed",
        "torchtitan #1373: a shared part expanded into tensor-parallel heads; training diverged after a thousand steps",
        (
            f"{SHARDING}:Sharding._over",
            "for n in parse_side(param.over).dims for a in",
            'for n in parse_side(param.over).dims if n != "group" for a in',
        ),
    ),
    mutant(
        "the gradient that leaves a region is not summed",
        "torchtitan #1805, #1878: a bare to_local() loses the tensor-parallel reduction",
        (f"{COLLECTIVES}:dual", "kind=DUAL[s.kind], ", 'kind="I>R" if s.kind == "I>R" else DUAL[s.kind], '),
    ),
    mutant(
        "partial gradients of the loss labelled as sums",
        "torchtitan PR #3412: the last hidden state under a sharded vocabulary",
        (f"{DECODER}:Decoder._into_vocab", "h, ENTER_VOCAB)", 'h, "batch seq* embed -> batch seq embed")'),
    ),
    mutant(
        "tied gradient not summed",
        "Megatron-LM #844: of the two uses of a tied embedding one has no gradient",
        (
            f"{DECODER}:Decoder._into_vocab",
            'used["embed" if self.config.tied else "head"]',
            '(used["embed"].detach() if ctx.sh.mesh is not None and ctx.sh.mesh.world > 1 else used["embed"]) '
            'if self.config.tied else used["head"]',
        ),
    ),
    mutant(
        "tied gradient doubled",
        "torchtitan #3174: a traced step counts the second use twice",
        (
            f"{DECODER}:Decoder._into_vocab",
            'used["embed" if self.config.tied else "head"]',
            '(used["embed"] + (used["embed"] - used["embed"].detach()) if ctx.sh.mesh is not None '
            'and ctx.sh.mesh.world > 1 else used["embed"]) if self.config.tied else used["head"]',
        ),
    ),
)

CONTEXT_PARALLEL = (
    mutant(
        "positions count from the start of a rank's part",
        "Megatron-LM's and torchtitan's context parallelism (#3257): a rotary table of local positions",
        (
            f"{DECODER}:Decoder.context",
            'positions = sh.index("seq", tokens.shape[1] * ranks, device=tokens.device)',
            "positions = torch.arange(tokens.shape[1], device=tokens.device)",
        ),
    ),
    mutant(
        "the causal mask by local positions",
        "torchtitan #4167: every rank masks as if its part began the sequence",
        (
            f"{CONTEXT}:_gathered",
            'sh.index(seq, k.shape[1], device=q.device if sh.mesh.simulated else "cpu")',
            'torch.arange(q.shape[1], device="cpu")',
        ),
    ),
    mutant(
        "documents forgotten where the sequence is cut",
        "torchtitan #4167: the mask is silently causal",
        (
            f"{CONTEXT}:_gathered",
            "    if segments is not None:\n        given",
            "    if segments is not None and not sh.axes(seq):\n        given",
        ),
    ),
    mutant(
        "balanced order not undone",
        "pytorch #152261: outputs of the load-balanced order taken for those of the plain one",
        (f"{ZIGZAG}:from_zigzag", "select(dim + 1, 1).flip(dim)", "select(dim + 1, 1)"),
    ),
    mutant(
        "gradients of keys do not come home",
        "Megatron-LM #1464, #1465: the backward of the ring is one exchange short",
        (f"{RING}:ring_backward", "_sent_home(ring, [gk, gv], offset)", "[gk, gv]"),
    ),
    mutant(
        "gradients of queries of the last part only",
        "Megatron-LM #1464: dq, dk, dv off by up to 120 % in ring attention",
        (f"{RING}:_gradients", "gq[:, rows] += a", "gq[:, rows] = a.to(dtype)"),
    ),
    mutant(
        "the ring compares a rank's own documents",
        "torchtitan #3257, Megatron-LM: documents of the keys do not travel with them",
        (f"{RING}:_masks", "else theirs[:, columns]", "else mine[:, columns]"),
    ),
    mutant(
        "gathered keys send no gradient back",
        "pytorch #172932: a round trip that loses the Partial of a gathered value",
        (f"{CONTEXT}:_gathered", "'kvseq')} | {seq}\"", "'kvseq')}\""),
    ),
    mutant(
        "heads replicated for Ulysses not summed",
        "torchtitan #1373, #3206: keys that several ranks read have the gradient of one",
        (f"{CONTEXT}:_all_to_all", '{KEYS} -> {KEYS_INSIDE} | seq")', '{KEYS} -> {KEYS_INSIDE}")'),
    ),
)

DROPOUT_AND_NORMS = (
    mutant(
        "one dropout mask for all parts of the sequence",
        "Megatron-LM #1256: for 16 months, as a context of the generator was dropped",
        (
            f"{DROPOUT}:_by_position",
            "index[dim] = sh.index(name, shape[dim], device=x.device)",
            "index[dim] = torch.arange(x.shape[dim], device=x.device)",
        ),
    ),
    mutant(
        "one dropout mask for all data ranks",
        "Paddle FleetX PR #1005: the seed lacks the axis",
        (
            f"{ACCUMULATE}:with_rows",
            'rows=sh.index("batch", n, device=device)',
            "rows=torch.arange(rows, device=device)",
        ),
    ),
    mutant(
        "dropout differs on replicas",
        "InternLM PR #405, Megatron-LM PR #4828: a seed by rank where tensor-parallel ranks must agree",
        (
            f"{DECODER}:Decoder._dropped",
            "y, self.config.dropout, fold_in(ctx.key, where)",
            'y, self.config.dropout, fold_in(fold_in(ctx.key, where), ctx.sh.mesh.position(ctx.sh.axes("mlp"))[0]) '
            'if ctx.sh.axes("mlp") else fold_in(ctx.key, where)',
        ),
    ),
    mutant(
        "one dropout mask for all microbatches",
        "Megatron-LM PR #4828, torchtitan #1750: the generator is set back for each of them",
        (
            f"{ACCUMULATE}:cut_batch",
            "rows=part(ctx.rows, i)",
            "rows=part(ctx.rows, i) - part(ctx.rows, i)[:1] + ctx.rows[:1]",
        ),
    ),
    mutant(
        "the norm counts replicas",
        "torchtune #2420, ROCm TransformerEngine #715: replicated and sharded gradients in one sum",
        (f"{NORM}:_sharded", "if mesh.size(d) > 1 and not p.is_replicate()", "if mesh.size(d) > 1"),
    ),
    mutant(
        "the norm misses parameters",
        "Megatron-LM PR #7530: a class of leaves is not in the list that is clipped by",
        (
            f"{NORM}:sum_of_squares",
            "if tree.is_float(x)]",
            "if tree.is_float(x) and not (isinstance(x, DTensor) and x.ndim == 1)]",
        ),
    ),
    mutant(
        "the norm stays each rank's own",
        "pytorch #170862, accelerate #4219: a partial norm, too small by the root of the ranks",
        (
            f"{NORM}:sum_of_squares",
            "torch.stack(summed([sums[at] for at in layouts], layouts))",
            "torch.stack([sums[at] for at in layouts])",
        ),
    ),
    mutant(
        "clipping by the norm of a rank's shards",
        "torchtune #2641: each rank clips by what it holds",
        (
            f"{CLIP}:clip_by_global_norm",
            "norm = global_norm(grads) if grad_norm is None else grad_norm",
            "norm = global_norm(tree.tree_map(leaves.local_of, grads))",
        ),
    ),
)

MUTANTS = {m.name: m for m in (*DATA_PARALLEL, *LOSS, *TENSOR, *CONTEXT_PARALLEL, *DROPOUT_AND_NORMS)}
