"""Tensor parallelism of the target within a replica: rank 0 runs the engine, the other ranks follow its target passes.

Rank 0 alone makes decisions (scheduler, plan, guard, drafts, sampling, clock), so the ranks cannot diverge. Each other
rank holds its shard of the target and of the KV cache, and executes the messages of rank 0:

    rank 0   ... pack -> send Forward -> own shard of the pass -> gather logits -> sample -> send Keep -> move keys
    rank r   Forward -> own shard of the same pass; Keep -> the same moves in its own cache

Sizes and host values travel over a pipe, indices in one broadcast. Drafts run on rank 0 only.

A captured step is one graph per rank, with the collectives inside:

    rank 0   send Replay -> graph: draft, broadcast inputs, own shard, gather logits, sample, broadcast moves, move keys
    rank r   Replay      -> graph:        broadcast inputs, own shard, gather logits,         broadcast moves, move keys
"""
