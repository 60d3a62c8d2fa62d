"""Tensor parallelism: one model over several processes, each with a share of every layer's heads and widths.

The engine lives in the process of rank 0, which decides everything; the others replay its passes over their own pages.
Open `shards` first, which says who has what, then `runners` (a pass over all ranks) and `follower` (the other process).
"""
