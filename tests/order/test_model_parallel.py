"""Shares of the data by mesh and group, and ranks of one model replica, which need one together."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from multipack import distributed
from multipack.distributed import data_ranks
from multipack.model_parallel import find_shared_replica, shares_replica


@pytest.fixture
def ranks():
    """Pretend to be one of several ranks; nothing is communicated."""

    def begin(rank, world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    gc.collect()  # meshes of other tests
    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


@pytest.mark.parametrize(
    ("rank", "share", "members"), [(0, 0, (0, 2)), (1, 0, (1, 3)), (2, 1, (0, 2)), (3, 1, (1, 3))]
)
def test_ranks_of_one_replica_have_one_share(ranks, rank, share, members):
    ranks(rank, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = data_ranks(mesh=mesh["dp"])
    assert (found.rank, found.num_replicas, found.members) == (share, 2, members)
    assert data_ranks(group=mesh["dp"].get_group()) == found
    found.check_unchanged()


@pytest.mark.parametrize("rank", range(8))
def test_several_dimensions_are_flattened(ranks, rank):
    # (dp_replicate 2, dp_shard 2, cp 2): ranks 0 1 | 2 3 | 4 5 | 6 7 are four replicas, in this order.
    ranks(rank, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    found = data_ranks(mesh=mesh["dp_replicate", "dp_shard"])
    assert (found.rank, found.num_replicas) == (rank // 2, 4)
    assert found.members == tuple(range(rank % 2, 8, 2))


def test_a_mesh_of_data_parallel_ranks_alone_needs_no_word(ranks):
    ranks(3, 4)
    meshes = [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")),
        init_device_mesh("cpu", (4,)),
        init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "ep")
        ),  # experts are spread over ranks with data of their own
        init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp")),
    ]
    found = data_ranks()
    assert (found.rank, found.num_replicas, found.discovered) == (3, 4, True)
    found.check_unchanged()
    for mesh in meshes[:2]:
        assert (data_ranks(mesh=mesh).rank, data_ranks(mesh=mesh).num_replicas) == (3, 4)


@pytest.mark.parametrize(
    "dimension", ["tp", "cp", "pp", "sp", "tensor_parallel", "sequence_parallel", "model"]
)
def test_undeclared_dimensions_of_a_mesh_are_refused(ranks, dimension):
    ranks(1, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", dimension))
    for arguments in ({}, {"mesh": mesh}):
        with pytest.raises(
            ValueError, match=rf"{dimension} = 2: 2 ranks compute each.*Pass mesh=mesh\['data'\]"
        ):
            data_ranks(**arguments)
    assert data_ranks(mesh=mesh["data"]).num_replicas == 2
    assert data_ranks(0, 2).num_replicas == 2


def test_a_mesh_of_one_replica_is_refused(ranks):
    # transformers' from_pretrained(tp_plan="auto") on four ranks makes this mesh.
    ranks(1, 4)
    mesh = init_device_mesh("cpu", (1, 1, 1, 4), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    with pytest.raises(ValueError, match=r"tp = 4: 4 ranks.*Pass rank=0, num_replicas=1"):
        data_ranks()
    assert data_ranks(mesh=mesh["dp_replicate", "fsdp"]).num_replicas == 1


def test_a_mesh_made_after_the_sampler_is_noticed(ranks):
    ranks(1, 4)
    found = data_ranks()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="tp = 2"):
        found.check_unchanged()
    del mesh
    gc.collect()
    with pytest.raises(ValueError, match=r"a process group has mesh_tp = 2"):  # which outlives its mesh
        found.check_unchanged()


def test_groups_named_as_megatron_does_are_refused(ranks):
    ranks(2, 4)
    dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    assert find_shared_replica() is None  # of other ranks
    dist.new_group([2, 3], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    with pytest.raises(
        ValueError, match=r"TENSOR_MODEL_PARALLEL_GROUP = 2.*Pass the data-parallel group by group="
    ):
        data_ranks()
    assert data_ranks(group=dist.new_group([0, 2])).rank == 1


def test_sizes_of_megatron_are_asked(ranks, monkeypatch):
    ranks(0, 4)
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: 1,
        get_pipeline_model_parallel_world_size=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    with pytest.raises(
        ValueError, match=r"pipeline_model_parallel = 2.*parallel_state.get_data_parallel_group\(\)"
    ):
        data_ranks()
    state.model_parallel_is_initialized = lambda: False
    assert data_ranks().num_replicas == 4


def test_what_may_contradict_is_refused(ranks):
    ranks(1, 4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="mesh and rank and num_replicas are given"):
        data_ranks(1, 4, mesh=mesh)
    with pytest.raises(ValueError, match="mesh and group are given"):
        data_ranks(mesh=mesh, group=dist.group.WORLD)
    with pytest.raises(TypeError, match="mesh is a str, not a DeviceMesh"):
        data_ranks(mesh="dp")
    other = SimpleNamespace(get_rank=lambda: 1, get_process_group_ranks=lambda group: [0, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "dist", other)
        with pytest.raises(ValueError, match=r"rank 1 is not in the group of ranks \[0, 2\]"):
            data_ranks(group=object())


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("TP", True),
        ("mesh_cp", True),
        ("CONTEXT_PARALLEL_GROUP", True),
        ("PIPELINE_MODEL_PARALLEL_GROUP", True),
        ("DATA_PARALLEL_GROUP", False),
        ("DATA_PARALLEL_GROUP_WITH_CP", False),
        ("dp_shard_cp", False),
        ("mesh_fsdp", False),
        ("undefined", False),
        ("infer_tp", False),
    ],
)
def test_names(name, shared):
    assert shares_replica(name) is shared
