from fmegatron.testing.equivalence import assert_equivalent, compare
from fmegatron.testing.layout import Layout
