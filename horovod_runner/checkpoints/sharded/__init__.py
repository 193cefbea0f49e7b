"""Sharded checkpoints: each rank writes and reads its part.

The format is that of torch.distributed.checkpoint.

    state --tree--> leaves by name --planner--> who writes what --writer--> a file of each rank
    a file of each rank --reader--> the parts that the ranks of another run need

It needs torch: ranks import it at their first sharded checkpoint.
"""
