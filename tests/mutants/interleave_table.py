"""Defects of microbatches by turns, each as a small edit of this library.

None changes a shape, none hangs, and none is seen where one microbatch runs behind the other.
"""

from __future__ import annotations

from tests.mutants.table import mutant

EXCHANGE, ACCUMULATE = "fmegatron.exchange", "fmegatron.accumulate"

INTERLEAVE_MUTANTS = (
    mutant(
        "the other microbatch's exchange is awaited",
        "one slot for the handle of what is under way: that of the last exchange is taken, whoever began it",
        (
            f"{EXCHANGE}:_Exchange.forward",
            "        pass_turn()\n",
            "        slot = begin_rows.__dict__\n        slot[len(started)] = started\n        pass_turn()\n"
            "        started = slot[len(started)]\n",
        ),
    ),
    mutant(
        "the gradient of one microbatch is dropped",
        "the buffer of the first is overwritten by that of the second, which began before the first had ended",
        (f"{ACCUMULATE}:_Together.add", "            self.grads[i] = g\n", "            self.grads[i] = None\n"),
    ),
    mutant(
        "gradients are reduced when the first microbatch has added to them",
        "a hook that knows of no other microbatch under way takes the first for the last",
        (f"{ACCUMULATE}:_Together.add", "self.left[i] -= 1", "self.left[i] -= 2"),
    ),
)
# which only the order of events shows: all numbers are right
WAITING = mutant(
    "the turn passes when the exchange is over",
    "a handle that is awaited where it is made: the overlap is there in name alone",
    (
        f"{EXCHANGE}:_Exchange.forward",
        "        pass_turn()\n        return tuple(end_rows(y) for y in started)\n",
        "        found = tuple(end_rows(y) for y in started)\n        pass_turn()\n        return found\n",
    ),
)
