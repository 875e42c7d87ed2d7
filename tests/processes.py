"""The package's pool of gloo processes (`fmegatron.testing.processes`), as the tests import it."""

from fmegatron.testing.processes import Pool, processes

__all__ = ["Pool", "processes"]
