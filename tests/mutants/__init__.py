"""Mutants: deliberate defects in shipped code, each of which the harness must catch (see `table`)."""
