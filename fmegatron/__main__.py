"""`python -m fmegatron`, also under torchrun: `torchrun --nproc-per-node 4 -m fmegatron train …`."""

import os
import sys

from fmegatron.cli import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # A rank has closed its files and left its group by now. The interpreter's own end would still tear down threads
        # that torch leaves behind, and one that is caught at the wrong moment aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
