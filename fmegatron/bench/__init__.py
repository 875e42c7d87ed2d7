"""`fmegatron bench`: the speed of a training step, beside its peers, in one run.

    works.py            what is computed: model, batch, and the floating-point operations of it
    ours.py             the contenders of this library: compiled per block or eager, without a mesh or on one of one rank
    peers_hf.py         Hugging Face transformers
    peers_megatron.py   Megatron-core, with Transformer Engine on a GPU
    timing.py           what a contender is, and how they take turns
    kernels.py          the time of one step by kinds of kernels
    report.py           the table, JSON; chart.py the bars
    run.py              the command

`settings.py` holds its flags and imports no torch.
"""
