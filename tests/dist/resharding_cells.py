"""Plans carried out by several processes over gloo; every rank makes the whole weights and looks at its shards."""

from __future__ import annotations

import hashlib

import torch

from verl.weight_sync.resharding import Layout, Resharder, decoder, make_plan

DENSE = decoder(
    layers=4, hidden=16, intermediate=48, heads=8, key_value_heads=2, vocabulary=64, head_dim=4, bias=True, itemsize=4
)
MIXTURE = decoder(
    layers=2, hidden=16, intermediate=16, heads=8, key_value_heads=8, vocabulary=32, head_dim=2, experts=8, itemsize=4
)
BUCKET = 4096


def pairs_of(world):
    if world == 4:
        return [
            (DENSE, Layout(2, 1, 2), Layout(1, 1, 4)),
            (DENSE, Layout(2, 1, 2), Layout(4, 1, 1)),
            (DENSE, Layout(2, 2, 1), Layout(1, 1, 4)),
            (DENSE, Layout(1, 4, 1), Layout(4, 1, 1)),
            (DENSE, Layout(1, 2, 2, virtual=2, depths=(1, 0, 2, 1)), Layout(2, 1, 2)),
            (MIXTURE, Layout(2, 1, 2, expert=4, expert_tensor=1), Layout(2, 1, 2, expert=2)),
        ]
    return [
        (DENSE, Layout(8, 1, 1), Layout(2, 1, 4)),
        (DENSE, Layout(2, 2, 2), Layout(4, 1, 2)),
        (DENSE, Layout(4, 1, 2, order="tp-pp-dp"), Layout(2, 1, 4)),
        (MIXTURE, Layout(1, 2, 4, expert=4), Layout(8, 1, 1, expert=8, expert_tensor=1)),
    ]


def whole(name, shape):
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def piece(name, entry, division, rank):
    low, high = division.span(int(division.index[rank]))
    return whole(name, entry.weight.shape).narrow(division.axis, low, high - low).contiguous()


def every_rank_gets_its_sampling_shards(ranks, folder):
    answers = []
    for model, training, sampling in pairs_of(ranks.size):
        plan = make_plan(model, training, sampling)
        entries = {name: entry for _, name, entry in plan.expanded()}
        resharder = Resharder(plan, ranks.rank, dtype=torch.float32, bucket_bytes=BUCKET)
        read = lambda name, entries=entries: piece(name, entries[name], entries[name].source, ranks.rank)
        exact, names = True, set()
        for name, shard in resharder.run(read):
            names.add(name)
            exact &= torch.equal(shard, piece(name, entries[name], entries[name].target, ranks.rank))
        wanted = {name for name, entry in entries.items() if entry.target.index[ranks.rank] >= 0}
        answers.append(
            {
                "pair": f"{training} -> {sampling}",
                "exact": exact,
                "complete": names == wanted,
                "sent": resharder.sent_bytes,
                "planned": int(plan.price.sent[ranks.rank]),
                "peak": resharder.peak_bytes,
                "bound": layer_bytes(plan, ranks.rank) + BUCKET,
            }
        )
    return answers


def layer_bytes(plan, rank):
    """The largest sampling layer of a rank, or one of the weights that belong to none."""
    sizes = {}
    for layer, name, entry in plan.expanded():
        if entry.target.index[rank] >= 0:
            low, high = entry.target.span(int(entry.target.index[rank]))
            size = entry.weight.num_bytes * (high - low) // max(entry.target.length, 1)
            sizes[layer if layer >= 0 else name] = sizes.get(layer if layer >= 0 else name, 0) + size
    return max(sizes.values(), default=0)


def a_shard_of_another_shape_is_refused(ranks, folder):
    plan = make_plan(DENSE, Layout(ranks.size, 1, 1), Layout(1, 1, ranks.size))
    resharder = Resharder(plan, ranks.rank, dtype=torch.float32)
    try:
        list(resharder.run(lambda name: torch.zeros(3, 3)))
    except Exception as error:
        return str(error)
    return ""
