"""The collectives inside compiled graphs: a backend for torch.compile that notes them whenever a graph runs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fmegatron import recording
from fmegatron.errors import UserError
from fmegatron.mesh import Mesh
from fmegatron.recording import Collective
from fmegatron.simulation import simulating

KINDS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}
BACKENDS = ("aot_eager",)


@contextlib.contextmanager
def one_rank_of(world: int) -> Iterator[None]:
    """Run the body as rank 0 of `world` ranks that are not there: collectives are issued, and what they give is not
    defined."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if simulating() or dist.is_initialized():
        raise UserError("collectives of compiled blocks are counted in a process without a process group or simulation")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()  # graphs that know the group


def counting(backend: str, mesh: Mesh) -> Callable[..., Any]:
    """A backend that runs graphs as `backend`, one of `BACKENDS`, does, and each time adds their collectives to the open
    records."""
    compile = importlib.import_module("functorch.compile")
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        inside = list(collectives_in(graph, mesh))

        def run(*args: Any) -> Any:
            for collective in inside:
                recording.note(collective)
            return graph.forward(*args)

        return compile.make_boxed_func(run)

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=compile.min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


def collectives_in(graph: torch.fx.GraphModule, mesh: Mesh) -> Iterator[Collective]:
    """The collectives of a graph of torch's operations, in its order."""
    for node in graph.graph.nodes:
        name = str(getattr(node.target, "_schema", None) and node.target._schema.name or "")
        if node.op != "call_function" or not name.startswith("_c10d_functional::"):
            continue
        operation = name.split("::")[1]
        if operation == "wait_tensor":
            continue
        if operation not in KINDS:
            raise UserError(f"a compiled block runs {name}, which the ledger does not know: use eager blocks")
        kind = KINDS[operation]
        value, axes = node.args[0].meta["val"], _axes(node.args[-1], mesh)
        yield Collective(kind, axes, mesh.size(axes), value.numel(), value.dtype)


def _axes(group: Any, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that the members of a group differ on."""
    if isinstance(group, str):
        group = importlib.import_module("torch.distributed.distributed_c10d")._resolve_process_group(group)
    differ, stride = [], 1
    for axis, size in reversed(list(mesh.sizes.items())):
        if len({rank // stride % size for rank in dist.get_process_group_ranks(group)}) > 1:
            differ.append(axis)
        stride *= size
    return tuple(reversed(differ))


__all__ = ["collectives_in", "counting", "one_rank_of"]
