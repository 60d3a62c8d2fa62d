"""Tensor parallelism: one model over several processes, each with a share of every layer's heads and widths.

The engine lives in the process of rank 0, which decides everything; the others replay its passes over their own pages
(`follower`). Start with `shards`, which says who has what.
"""
