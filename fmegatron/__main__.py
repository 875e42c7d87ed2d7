"""`python -m fmegatron`, also under torchrun: `torchrun --nproc-per-node 4 -m fmegatron train …`."""

import sys

from fmegatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
