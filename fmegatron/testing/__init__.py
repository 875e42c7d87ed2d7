"""Every layout computes the same function: prove it for a model of your own, on a laptop.

    from fmegatron.testing import assert_equivalent

    assert_equivalent((spec, loss), "dp=2,tp=2 sp zero=3 micro=2")

A `Layout` says everything about a layout in one line. `layouts`, `configs` and `batches` are hypothesis strategies that
draw legal ones and shrink towards the smallest. `ledger` counts what a layout communicates. `processes` is a pool of
gloo processes. `fmegatron verify MODEL` checks many layouts and prints a table.
"""

from fmegatron.testing.batches import make_batch
from fmegatron.testing.comparing import Difference
from fmegatron.testing.equivalence import Result, assert_equivalent, compare
from fmegatron.testing.layout import Layout
from fmegatron.testing.ledger import Ledger, ledger
from fmegatron.testing.models import families, small_config, small_model
from fmegatron.testing.processes import processes
from fmegatron.testing.program import Program
from fmegatron.testing.shrinking import shrink
from fmegatron.testing.strategies import batches, configs, layouts

__all__ = [
    "Difference",
    "Layout",
    "Ledger",
    "Program",
    "Result",
    "assert_equivalent",
    "batches",
    "compare",
    "configs",
    "families",
    "layouts",
    "ledger",
    "make_batch",
    "processes",
    "shrink",
    "small_config",
    "small_model",
]
