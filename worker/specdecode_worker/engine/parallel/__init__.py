"""A replica on several devices: rank 0 is the engine as ever, the others run its target passes alongside.

All that decides (scheduler, plan, guard, drafts, sampling, the clock) lives on rank 0 alone, so nothing can diverge.
The others hold their part of the target and of its keys and values, and do what they are told:

    rank 0   launch: ... pack -> tell(Forward) -> its part of the pass -> logits of all -> choose -> tell(Keep) -> keep
    rank r   listen: Forward -> its part of the same pass; Keep -> the same moves in its own cache

What is told goes over a pipe (sizes and host figures) and one broadcast (indices). Drafts run on rank 0 alone.
"""
