"""Defects of checkpoints that go from one layout to another, each as a small edit of this library.

None changes a shape or a dtype, none raises, and on one device all are right: the run goes on with other numbers.
"""

from __future__ import annotations

from tests.mutants.table import mutant

READING = "fmegatron.checkpoint.reading"

# the new tensors of the optimizer's state that are cut over ranks
MOMENTS = '{n: x for n, x in new.items() if n.startswith("opt.") and isinstance(x, DTensor) and any(p.is_shard() for p in x.placements)}'

CHECKPOINT_MUTANTS = {
    m.name: m
    for m in (
        mutant(
            "moments resharded as if cut along the first dim",
            "Megatron-LM #7162: most of its formats keep moments as ranges of the data ranks at the time of saving; read by such "
            "ranges, they are right under the same cut alone",
            (
                f"{READING}:_load",
                "        _read(found, new)\n",
                "        flat = {}\n"
                f"        for n, x in ({MOMENTS}).items():\n"
                "            part, where = x.to_local(), [type(p)(0) if p.is_shard() else p for p in x.placements]\n"
                "            if x.shape[0] * part.numel() % x.numel() == 0:\n"  # rows divide; else it is read as it is
                "                part = part.view(-1, *x.shape[1:])\n"
                "                flat[n] = DTensor.from_local(\n"
                "                    part, x.device_mesh, where, run_check=False, shape=x.shape, stride=x.stride()\n"
                "                )\n"
                "        _read(found, {**new, **flat})\n",
            ),
        ),
        mutant(
            "moments of the rank before",
            "a shard is found by the number of a rank, in another order of the mesh than the one it was written in",
            (
                f"{READING}:_load",
                "        _read(found, new)\n",
                "        _read(found, new)\n"
                f"        for x in ({MOMENTS}).values():\n"
                "            part, group = x.to_local(), x.device_mesh._flatten().get_group()\n"
                "            parts = [torch.empty_like(part) for _ in range(group.size())]\n"
                "            torch.distributed.all_gather(parts, part, group=group)\n"
                "            part.copy_(parts[group.rank() - 1])\n",
            ),
        ),
        mutant(
            "moments begin anew",
            "AReaL #1468: a load under another layout silently drops the moments",
            (
                f"{READING}:_load",
                "        _read(found, new)\n",
                f"        _read(found, {{n: x for n, x in new.items() if n not in {MOMENTS}}})\n"
                f"        for x in ({MOMENTS}).values():\n"
                "            x.to_local().zero_()\n",
            ),
        ),
    )
}
