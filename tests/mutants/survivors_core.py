"""Why changes of the sharding core are not caught, as in `survivors.py`."""

CHECKING = "the checking mode alone reads it, which compares declared layouts: no number can differ"
IGNORED = "equivalent: the loss and the gradients of an ignored token are set to zero behind it"
INTEGERS = "equivalent: integers have no gradient, and both arrows are the same all-gather"

COSTS_NOTHING = "equivalent: both names stand for what costs no collective"

ONE_CHUNK = "equivalent: what is not cut is one chunk, which is returned before its rows are looked at"
CHUNKS_DIVIDE = "equivalent: chunks and parts divide, so that one more is rounded away"
SAME_PRODUCT = "equivalent: chooses between a product written in its place and the same one copied there"

SURVIVORS_CORE: dict[str, str] = {
    # sharding, layout
    "fmegatron.sharding:Sharding.sum: 1 -> *": "equivalent: the plan is in the cache by then, under the same name",
    "fmegatron.sharding:Sharding.index: 'I' -> 'R'": "equivalent: positions need no gradient, so that both are one type",
    "fmegatron.sharding:Sharding.index: (ranks := self._zigzag(dim, axes)) > 1 -> *": (
        "equivalent: over one rank the zigzag order is the plain one"
    ),
    "fmegatron.sharding:Sharding.index: 1 -> 0 #1": "equivalent: over one rank the zigzag order is the plain one",
    "fmegatron.sharding:Sharding._by_placements: '?' -> 'I'": (
        "equivalent: between ? and I there is no arrow, and the checking mode has no axis that a placement could name"
    ),
    # collectives, zero
    "fmegatron.collectives:_join: 1 -> 0 #1": "equivalent: the general way joins one dim as well",
    "fmegatron.collectives:COST: 'slice' -> 'nothing'": COSTS_NOTHING,
    "fmegatron.collectives:COST: 'nothing' -> 'slice' #2": COSTS_NOTHING,
    "fmegatron.collectives:COST: 'nothing' -> 'slice' #3": COSTS_NOTHING,
    "fmegatron.zero:_collective: 'slice' -> 'nothing' #1": (
        "equivalent: what is a slice in one direction is an all-gather in the other"
    ),
    # the layers
    "fmegatron.parallel.stack:sharded_store: 'leave' -> 'enter' #1": "equivalent: there are as many arrows on the way back",
    "fmegatron.parallel.stack:_Layers.begin: [i for i, t in enumerate(flat) if is_float(t) and t.requires_grad] -> *": (
        "equivalent: what needs no gradient goes through an identity"
    ),
    "fmegatron.parallel.stack:_Layers.again: self.backwards.discard(n) -> pass": (
        "equivalent: layers come back in the order n, n - 1, …, so that nobody asks for n again"
    ),
    "fmegatron.sharding:Sharding._filled_between: 0 -> 1": (
        "equivalent: a dim that does not divide is on the same axes in equations and at rest"
    ),
    # mesh, rules
    "fmegatron.mesh:Mesh.coordinate: 1 -> 0 #1": "equivalent: every rank is the first of an axis of one",
    "fmegatron.mesh:Mesh._make_group: 1 -> 0": "equivalent: the group of one axis is made anew of the same ranks in the same order",
    "fmegatron.mesh:make_mesh: 1 -> 0": "equivalent: a mesh without tp has nothing to cut whichever number below 2 stands for it",
    "fmegatron.rules:standard_rules: 'tp_group' -> 'tp_kv'": (
        "differs only on a mesh that names tp_group by hand and no tp_kv, which is refused without the change"
    ),
    # the product in chunks
    "fmegatron.overlap:plan_of: overlap > 1 -> overlap >= 1": "equivalent: one chunk is the whole product",
    "fmegatron.overlap:plan_of: 1 -> 0 #2": "equivalent: one chunk is the whole product",
    "fmegatron.overlap:entering: (n for n in equation.output.dims if base(n) not in have) -> *": (
        "equivalent: the axes of a dim that x has are taken by this dim in the region too"
    ),
    "fmegatron.overlap:_inside: name.count('*') > other.count('*') -> *": "equivalent: with as many marks both names are one",
    "fmegatron.overlap:rows_of: r.joined * r.handed -> *": "equivalent: along which rows chunks are cut changes no sum",
    "fmegatron.overlap:costs: 'nothing' -> 'slice'": "equivalent: chunks where there is nothing to hide are as right",
    "fmegatron.overlap:costs: 'slice' -> 'nothing'": "equivalent: chunks where there is nothing to hide are as right",
    "fmegatron.overlap:Running._piece: 1 -> 0 #1": "equivalent: a slot of one chunk is the whole",
    "fmegatron.overlap:Running._multiply: 1 -> 0 #1": SAME_PRODUCT,
    "fmegatron.overlap:division: 1 -> 0 #1": "equivalent: one chunk is the whole product",
    "fmegatron.overlap:division: size > 0 -> size >= 0": "equivalent: chunks of nothing are nothing",
    "fmegatron.overlap:division: 0 -> 1 #2": "equivalent: one row is not divided by two chunks or more",
    "fmegatron.overlap:division: 0 -> 1 #3": ONE_CHUNK,
    "fmegatron.overlap:division: 0 -> 1 #4": ONE_CHUNK,
    "fmegatron.overlap:division: 1 -> 2 #4": ONE_CHUNK,
    "fmegatron.overlap:division: 1 -> 0 #4": ONE_CHUNK,
    "fmegatron.overlap:division: 1 -> 2 #5": ONE_CHUNK,
    "fmegatron.overlap:division: 1 -> 0 #5": ONE_CHUNK,
    "fmegatron.overlap:Whole.put: 1 -> 0": "equivalent: one chunk is copied into a whole of its size",
    "fmegatron.overlap:slot: x.shape[dim] // count -> *": CHUNKS_DIVIDE,
    "fmegatron.overlap:slot: x.shape[dim] // (parts * count) -> *": CHUNKS_DIVIDE,
    "fmegatron.overlap:_copy: chunk.shape[dim] // parts -> *": CHUNKS_DIVIDE,
    "fmegatron.overlap:_multiply_into: [n for n in s if n in t and n not in u] -> *": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: n in t -> n not in t": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: n not in u -> n in u": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: list(o) == rows + columns -> *": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: rows + columns -> rows": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: parts[1] > 1 -> parts[1] >= 1": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: 1 -> 0 #1": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: 1 -> 2 #2": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: 1 -> 0 #2": SAME_PRODUCT,
    "fmegatron.overlap:_multiply_into: x.permute([a.index(n) for n in rows + sums]) -> x": (
        "equivalent: where the product is written in its place, its rows and sums stand in x's order"
    ),
    # primitives
    "fmegatron.primitives.cross_entropy:linear_cross_entropy: 1 -> 2 #4": "equivalent: how many tokens go at a time",
    "fmegatron.primitives.embedding:embedding: 'vocab' -> 'kv'": CHECKING,
    "fmegatron.primitives.cross_entropy:_loss: 'vocab' -> 'kv'": CHECKING,
    "fmegatron.primitives.cross_entropy:_loss: 'batch seq vocab -> batch seq | vocab' -> *": (
        "the maximum has no gradient, so that the checking mode alone tells both types apart"
    ),
    "fmegatron.primitives.cross_entropy:_loss: 1 -> 2": "equivalent: every number below zero stands for no label",
    "fmegatron.primitives.cross_entropy:_loss: 1 -> 0": IGNORED,
    "fmegatron.primitives.cross_entropy:_loss: (at >= 0) & (at < end) & ~ignored -> (at >= 0) & (at < end)": IGNORED,
    "fmegatron.primitives.cross_entropy:_loss: (at >= 0) & (at < end) -> at < end": (
        "equivalent: every number below zero stands for no label"
    ),
    "fmegatron.primitives.dropout:_by_position: 0 -> 1 #1": (
        "equivalent: at a rate of 0 every element is kept and divided by 1"
    ),
    # attention
    "fmegatron.parallel.context:_all_to_all: 'seq**' -> 'seq' #2": "equivalent: a ring over no axes is plain attention",
    "fmegatron.parallel.context:context_attention: 'gather' -> 'ring'": "equivalent: without sharding the kind is not read",
    "fmegatron.parallel.context:_gathered: f'batch {seq} -> batch kvseq | {seq}' -> *": (
        "integers have no gradient, and both arrows are the same all-gather: the checking mode alone tells them apart"
    ),
    "fmegatron.parallel.context:_all_to_all: 'batch seq -> batch seq** | seq' -> *": INTEGERS,
    "fmegatron.parallel.context:factoring: 1 -> 2": "equivalent: cp + 1 does not divide cp",
    "fmegatron.parallel.context:factoring: kind == 'ulysses+ring' -> *": "equivalent: the wording of a refusal",
    "fmegatron.parallel.context:factoring: 'ulysses+ring' -> 'ulysses'": "equivalent: the wording of a refusal",
    # accumulate
    "fmegatron.accumulate:_local_sum: any(*": (
        "a sum whose result is cut too: buckets run those arrows as well, in collectives shared with other sums"
    ),
    # stack
    "fmegatron.parallel.stack:_used_as_stored: 'enter' -> 'leave'": "equivalent: as many arrows lead back as there",
    "fmegatron.parallel.stack:_used_as_stored: *": (
        "chooses between a plain loop and one that gathers ahead and frees: the same numbers, other memory and overlap"
    ),
}
