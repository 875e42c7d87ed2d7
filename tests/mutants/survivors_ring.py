"""Why changes of rings, parts of unequal size, batches that are filled up, buckets and ZeRO are not caught; see
tests/mutants/survivors.py.

Keys that end in "#n" are of one change among several of the same text (`Change.id`).
"""

EVEN = "equivalent: in zigzag order a part has two runs of one size, so that 2 divides it"
UPPER = "equivalent: the first candidate, which is no longer than all n - 1 steps, takes its place"
OTHERS = "equivalent: the offset 0 is that of the steps only where it is the first"
SAME_WAY = "equivalent: the two sequences of steps are dual, and one is empty where the other is"
NOT_DELAYED = "equivalent: no delayed sharding comes here, and without that both are the way to the state's layout"
MORE_NONE = "equivalent: autograd leaves out what stands behind the last input's gradient, if it is None"
TWO_DIMS = "equivalent: what several leaves go in has two dims already, or is made flat next"

SURVIVORS_RING: dict[str, str] = {
    "fmegatron.parallel.ring:runs_of: part // 2 -> (part + 1) // 2": EVEN,
    "fmegatron.parallel.ring:legs: ranks - 1 -> ranks #1": UPPER,
    "fmegatron.parallel.ring:legs: ranks - 1 -> ranks + 1 #1": UPPER,
    "fmegatron.parallel.ring:legs: 1 -> 0 #1": UPPER,
    "fmegatron.parallel.ring:legs: 0 -> 1 #1": UPPER,
    "fmegatron.parallel.ring:_passing: following < 0 -> following <= 0": OTHERS,
    "fmegatron.parallel.ring:_passing: 0 -> 1 #1": OTHERS,
    "fmegatron.parallel.ring:ring_over: 'ring' -> 'gather'": "equivalent: nothing else in the cache has this name",
    "fmegatron.parallel.ring:RingAttention.backward: 10 -> 11": MORE_NONE,
    "fmegatron.parallel.ring:RingAttention.backward: 5 -> 6": MORE_NONE,
    "fmegatron.uneven:lay_out: 1 -> 0 #1": "equivalent: the way for several axes gives the same for one",
    "fmegatron.uneven:whole: 1 -> 0 #1": "equivalent: the way for several axes gives the same for one",
    "fmegatron.buckets:Moving._issue: 'I>R' -> 'P>I' #1": "equivalent: a view of the value in place of the value",
    "fmegatron.buckets:Moving._take: 1 -> 2 #1": TWO_DIMS,
    "fmegatron.buckets:Moving._take: 0 -> 1 #5": "equivalent: leaves that go together, two or more, have one collective",
    "fmegatron.buckets:_joined: part.dim() > 1 -> part.dim() >= 1": "equivalent: what is gathered or cut has a dim more",
    "fmegatron.buckets:_joined: 1 -> 0 #3": "equivalent: what is gathered or cut has a dim more",
    "fmegatron.zero:splits_state: 'return' -> 'shard' #1": SAME_WAY,
    "fmegatron.zero:_returned: 'return' -> 'shard' #1": SAME_WAY,
    "fmegatron.zero:_cut: 'shard' -> 'settle' #1": NOT_DELAYED,
    "fmegatron.zero:cut_like_state: 'shard' -> 'settle' #1": NOT_DELAYED,
}
