"""Process groups that some ranks make by themselves."""

import pytest
import torch
import torch.distributed as dist

from fmegatron.groups import group_of
from fmegatron.mesh import make_mesh
from fmegatron.testing import processes

pytestmark = pytest.mark.xdist_group("gloo")


def after_different_groups():
    """[is a group the same one again?, the sum of ranks over all, over this rank's pair], where two of four ranks have made
    groups that the others have not; the worker threads of the default group, of a mesh's and of these."""
    rank = dist.get_rank()
    if rank < 2:
        group_of([0, 1])
    found = [group_of([3, 1, 0, 2]) is group_of(range(4))]
    made = group_of(range(4)), group_of([1, 3] if rank % 2 else [2, 0])
    for group in made:
        x = torch.tensor([rank])
        dist.all_reduce(x, group=group)
        found.append(int(x))
    made = dist.group.WORLD, make_mesh("dp=2,tp=2", device="cpu").process_group(("tp",)), *made
    return [*found, {group._get_backend(torch.device("cpu")).options._threads for group in made}]


def test_ranks_that_made_different_numbers_of_groups_meet_in_one():
    """Two workers of a gloo group would free the same memory twice, once in a long while (see `one_gloo_thread`)."""
    assert processes(4).run(after_different_groups, timeout=60) == [[True, 6, 2, {1}], [True, 6, 4, {1}]] * 2


def after_an_end():
    """[is it another group?, the sum of ranks in it], each time that a group was destroyed."""
    found, group = [], group_of(range(2))
    for _ in range(2):
        dist.destroy_process_group(group)
        before, group = group, group_of(range(2))
        x = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(x, group=group)
        found.append((group is not before, int(x)))
    return found


def test_a_group_that_was_destroyed_is_made_again():
    assert processes(2).run(after_an_end, timeout=60) == [[(True, 3)] * 2] * 2
