"""Defects of pipelines, each as a small edit of this library: real frameworks shipped them or easily might.

None changes a shape or a dtype, none hangs, and none is seen without a pipeline: each makes a number wrong, on LAYOUT of
MODEL at the latest.
"""

from __future__ import annotations

from tests.mutants.table import mutant

MODEL = "llama,layers=2,tied=1,dropout=0.2"
LAYOUT = "pp=2 micro=4 schedule=zbh1 mask=uneven rows=8"

PIPELINE = "fmegatron.parallel.pipeline"

MICROBATCHES = (
    mutant(
        "a microbatch is used twice",
        "the data iterator of each stage is advanced by itself; all stages agree, and the first microbatch is never seen",
        (f"{PIPELINE}:_Run.within", "part, ctx = self.parts[m]", "part, ctx = self.parts[max(m, 1)]"),
    ),
    mutant(
        "a stale activation",
        "a buffer for what is received is not replaced: every microbatch behind the first meets the first one's stream",
        (
            f"{PIPELINE}:_Run.take_input",
            "return unflatten(structure(self.carry(m)), x.wait()) if isinstance(x, Arrival) else x",
            "x = unflatten(structure(self.carry(m)), x.wait()) if isinstance(x, Arrival) else x\n"
            "        return self.__dict__.setdefault('stale', {}).setdefault(s, x)",
        ),
    ),
    mutant(
        "a stale gradient of a stage's output",
        "the same on the way back",
        (
            f"{PIPELINE}:_Training.take_gradient",
            "arrived = iter(g.wait())",
            "arrived = iter(self.__dict__.setdefault('stale', {}).setdefault(s, g.wait()))",
        ),
    ),
    mutant(
        "dropout repeats in each microbatch",
        "random numbers by the first microbatch's rows in all: right for one microbatch, correlated for several",
        (f"{PIPELINE}:_Run.within", "part, ctx = self.parts[m]", "part, ctx = self.parts[m][0], self.parts[0][1]"),
    ),
)
GRADIENTS = (
    mutant(
        "the last weight gradient is dropped",
        "zero-bubble schedules flush what they delayed at the end of a step; one is left in the queue",
        (
            f"{PIPELINE}:_Training.giving",
            "            self.add(found)",
            "            self.add(found if kind != WEIGHT or m != self.table.microbatches - 1 else [])",
        ),
    ),
    mutant(
        "only the last microbatch's gradient survives on a stage",
        "the accumulator is reset at every backward",
        (f"{PIPELINE}:_Training.add", "self.grads[i].add_(g)", "self.grads[i].copy_(g)"),
    ),
    mutant(
        "the tied weight's gradient stays each stage's own",
        "embedding and head drift apart: the sum over the two stages is missing",
        (f"{PIPELINE}:_Training.share_tied", "self.grads[i] = g + other", "self.grads[i] = g"),
    ),
    mutant(
        "the tied weight is updated on one stage only",
        "the first stage has the sum, and the last one goes on with what it had",
        (
            f"{PIPELINE}:_Training.share_tied",
            "self.grads[i] = g + other",
            "self.grads[i] = g + other if self.pipe.rank == self.pipe.owners[0] else g * 0",
        ),
    ),
    mutant(
        "the loss is a mean of means",
        "each microbatch divides by its own tokens, whose numbers differ",
        (
            f"{PIPELINE}:_Run.within",
            "evaluate(terms, stats, self.known, self.scale, self.sh, loss_scale, at_once=False)",
            "evaluate(terms, stats, self.known, scales(dict(self.pipe.weights(part)), self.sh), self.sh, loss_scale, "
            "at_once=False)",
        ),
        (
            f"{PIPELINE}:_Run.within",
            "return x, tree_map(cut_off, aux)",
            "return x / self.table.microbatches, tree_map(cut_off, aux)",
        ),
    ),
)
NORMS = (
    mutant(
        "the norm forgets the other stages",
        "each stage clips by the norm of what it holds",
        (f"{PIPELINE}:Pipeline.norm", "dist.all_reduce(both, group=self.group)", "pass"),
    ),
    mutant(
        "the norm forgets the last stage",
        "a stage is not in the group over which squares are summed",
        (
            f"{PIPELINE}:Pipeline.norm",
            "mine = sum_of_squares(values)",
            "mine = sum_of_squares(values) * (self.rank < self.table.ranks - 1)",
        ),
    ),
    mutant(
        "the norm counts tied weights on both stages",
        "Megatron-LM marks a parameter as shared for this; a mark that is lost is not seen in the loss",
        (f"{PIPELINE}:Pipeline.norm", "if self.owners[0] != self.rank and self.ends.tied:", "if False:"),
    ),
)

PIPELINE_MUTANTS = {m.name: m for m in (*MICROBATCHES, *GRADIENTS, *NORMS)}
