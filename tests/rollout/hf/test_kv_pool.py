"""Blocks of keys and values: nothing is lost or mixed up when rows come, go and move."""

from __future__ import annotations

import dataclasses

import torch

from tests.harness.samplers import prompt, requests, sample, tiny_model
from verl.rollout.hf import kv_pool
from verl.rollout.hf.kv_pool import BufferPool, Group, KVBlock, KVShape, capacity_class, move_groups, regroup
from verl.rollout.hf.rows import Prompt, Row
from verl.rollout.hf.sampler import HFSampler

SHAPE = KVShape(num_layers=2, num_heads=3, key_dim=4, value_dim=5, dtype=torch.float32, device=torch.device("cpu"))


def pool() -> BufferPool:
    return BufferPool(torch.float32, torch.device("cpu"))


def row(name: int, cached: int = 3) -> Row:
    made = Row.bare(Prompt((name,) * cached))
    made.tokens = [1]
    return made


def fill(block: KVBlock, *members: list[Row | None], prefix_len: int = 0) -> None:
    """Groups of rows whose cells hold the number of their first prompt token; a prefix holds its first row's."""
    block.reserve(len(members))
    for rows in members:
        index = block.append(Group(rows, prefix_len))
        for slot, member in enumerate(rows):
            if member is not None:
                block.keys[:, index, :, slot] = number(member)
                block.values[:, index, :, slot] = -number(member)
        if block.prefix_keys is not None:
            block.prefix_keys[:, index] = 100 * number(next(r for r in rows if r))


def number(member: Row) -> int:
    return member.prompt.token_ids[0]


def check(block: KVBlock) -> None:
    """Every row is where its cell says, with its own numbers in both parts."""
    for index, group in enumerate(block.groups):
        for slot, member in enumerate(group.rows):
            if member is not None:
                assert (member.cell.block, member.cell.group, member.cell.slot) == (block, group, slot)
                assert bool((block.keys[:, index, :, slot, :3] == number(member)).all())
                assert bool((block.values[:, index, :, slot, :3] == -number(member)).all())


def test_a_buffer_that_was_given_back_serves_the_next_block_of_similar_size():
    memory = pool()
    first = memory.take(1000)
    assert memory.num_bytes == 4000
    memory.give(first)
    assert memory.take(900).data_ptr() == first.data_ptr()
    assert memory.num_bytes == 4000
    memory.give(first)
    assert memory.take(100_000).numel() == 100_000
    memory.clear()
    assert memory.num_bytes == 400_000


def test_what_does_not_fit_is_let_go_where_memory_is_scarce():
    """On a GPU a block that grows through five capacities would otherwise hold the buffers of all five."""
    memory = BufferPool(torch.float32, torch.device("meta"))
    first = memory.take(1000)
    memory.give(first)
    assert memory.take(900) is first
    memory.give(first)
    memory.take(100_000)
    assert memory.num_bytes == 400_000
    shape = dataclasses.replace(SHAPE, device=torch.device("meta"))
    block = KVBlock(shape, memory, width=1, prefix_capacity=0, capacity=16)
    for _ in range(100):
        fill(block, [row(1)])
    assert block.room < 1.25 * 100
    before = memory.num_bytes
    wider = KVBlock(shape, memory, width=1, prefix_capacity=0, capacity=32)
    move_groups(block, wider, range(100))
    block.free()
    wider.reserve(50)
    assert memory.num_bytes < 400_000 + 4 * (before - 400_000) and not block.keys.numel()


def test_rows_that_outgrow_a_block_one_after_another_take_little_more_than_twice_their_memory(monkeypatch):
    """Where memory is scarce a sampler admits rows up to two fifths of it; the same tokens come out."""
    jobs = requests([prompt(24, n) for n in range(12)], max_tokens=56, ignore_eos=True)
    drawn, held, allocate = [], [], KVBlock._allocate
    for scarce in (False, True):
        monkeypatch.setattr(kv_pool, "memory_is_scarce", lambda device, scarce=scarce: scarce)
        made = HFSampler(tiny_model(), owns_model=True, record=True, max_num_seqs=12, max_num_batched_tokens=60)
        most = 0

        def note(block: KVBlock, room: int) -> None:
            nonlocal most
            allocate(block, room)
            most = max(most, block.pool.num_bytes)

        monkeypatch.setattr(KVBlock, "_allocate", note)
        drawn.append([done.token_ids for done in sample(made, jobs)])
        held.append(most / (len(jobs) * 80 * made._runner.shape.token_bytes))
    assert drawn[0] == drawn[1]
    assert held[1] < 2.4 < 3 < held[0], held


def test_a_block_keeps_its_contents_when_it_needs_more_room():
    block = KVBlock(SHAPE, pool(), width=1, prefix_capacity=0, capacity=16)
    fill(block, [row(1)], [row(2)])
    assert block.room == 2
    fill(block, [row(3)])
    assert block.room == 4
    check(block)


def test_holes_are_closed_by_groups_from_the_end():
    block = KVBlock(SHAPE, pool(), width=1, prefix_capacity=0, capacity=16)
    rows = [row(i) for i in range(1, 7)]
    fill(block, *[[r] for r in rows])
    for index in (0, 2, 5):
        block.groups[index].rows[0] = None
    block.compact()
    assert sorted(number(g.rows[0]) for g in block.groups) == [2, 4, 5]
    check(block)


def test_whole_groups_move_with_their_prefix_and_their_holes():
    memory = pool()
    source = KVBlock(SHAPE, memory, width=2, prefix_capacity=16, capacity=16)
    target = KVBlock(SHAPE, memory, width=2, prefix_capacity=32, capacity=32)
    fill(target, [row(9), row(8)], prefix_len=2)
    fill(source, [row(1), None], [row(2), row(3)], [row(4), row(5)], prefix_len=2)
    move_groups(source, target, [0, 2])
    assert [[r and number(r) for r in g.rows] for g in target.groups] == [[9, 8], [1, None], [4, 5]]
    assert target.prefix_keys[0, :, 0, 0, 0].tolist() == [900, 100, 400]
    check(target)
    source.compact()
    assert [[number(r) for r in g.rows] for g in source.groups] == [[2, 3]]
    check(source)
    move_groups(source, target, [0])
    source.compact()
    assert not source.groups and len(target.groups) == 4
    check(target)


def test_sparse_groups_are_laid_out_in_narrower_ones():
    memory = pool()
    source = KVBlock(SHAPE, memory, width=4, prefix_capacity=16, capacity=16)
    target = KVBlock(SHAPE, memory, width=2, prefix_capacity=16, capacity=32)
    fill(source, [row(1), None, row(2), row(3)], [None, row(4), None, None], prefix_len=2)
    regroup(source, target, [(0, [0, 2]), (0, [3]), (1, [1])])
    assert [[r and number(r) for r in g.rows] for g in target.groups] == [[1, 2], [3, None], [4, None]]
    assert target.prefix_keys[1, :, 2, 0, 3].tolist() == [100, 100, 400]
    assert [g.prefix_len for g in target.groups] == [2, 2, 2]
    check(target)
    source.compact()
    assert source.groups == []


def test_the_longest_row_counts_its_own_part_only():
    group = Group([row(1, cached=7), None, row(2, cached=9)], prefix_len=5)
    assert group.longest == 4 and group.num_alive == 2


def test_capacities_grow_in_steps_of_at_most_a_quarter():
    assert [capacity_class(n) for n in (1, 16, 17, 128, 129, 256, 257)] == [16, 16, 32, 128, 160, 256, 320]
    assert all(n <= capacity_class(n) <= max(1.25 * n + 1, n + 15) for n in range(1, 3000))
