"""The runners of a model that several processes share: rank 0's, which the engine has, and those of the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from microturn.model.batch import Batch
from microturn.model.parallel.commands import Allocate, Pass
from microturn.model.parallel.copier import ParallelCopier
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.packed_batch import PackedBatch
from microturn.model.parallel.ranks import Ranks
from microturn.model.parallel.share import Share
from microturn.model.runner import ModelRunner


class LeadingRunner(ModelRunner):
    """Runs batches over the shares of all ranks; made by `leading_runner`.

    Attributes:
        followers: the other ranks.
    """

    followers: Followers

    def run(self, batch: Batch) -> Tensor:
        """See `Runner.run`."""
        with self.followers.together():
            return super().run(batch)

    def close(self) -> None:
        """See `ModelRunner.close`."""
        self.followers.close()

    def _embed(self, batch: Batch) -> Tensor:
        # What a batch can fail for comes first: the others have not been told of it yet.
        embeds = super()._embed(batch)
        self.followers.tell(Pass(PackedBatch.of(batch), self._may_replay))
        return self.followers.ranks.share(embeds)

    @property
    def _may_replay(self) -> bool:
        return False


class FollowingRunner(ModelRunner):
    """Runs the batches that rank 0 runs, over this rank's share; its logits are of no use.

    Attributes:
        ranks: all of them.
    """

    ranks: Ranks

    def follow(self, told: Pass) -> None:
        """Runs a pass."""
        self.run(told.batch.unpacked())

    def _embed(self, batch: Batch) -> Tensor:
        embeds = torch.empty(batch.num_tokens, self.hidden_size, dtype=self.model.dtype, device=self.kv.device)
        return self.ranks.share(embeds)


def leading_runner(share: Share, followers: Followers, pages: Allocate, **checked: Any) -> LeadingRunner:
    """The runner of rank 0, with new pages at all ranks.

    Args:
        share: rank 0's.
        followers: the other ranks.
        pages: to allocate.
        checked: results of the probe (see `Runner`).
    """
    with followers.doing(pages):
        kv = pages.new_kv(share.shard.shapes, share.ranks.device, partial(ParallelCopier, followers=followers))
    runner: LeadingRunner
    if share.load.for_gpu:
        from microturn.model.parallel.gpu_runners import LeadingGpuRunner  # what only a GPU needs

        runner = LeadingGpuRunner(share.model, kv, **share.of_gpu_runner, **pages.of_gpu_runner, **checked)
    else:
        runner = LeadingRunner(share.model, kv, decoder=share.decoder, **checked)
    runner.followers = followers
    runner.other_weight_bytes = share.other_bytes
    runner.vocab_size = share.shard.vocab_size
    return runner


def following_runner(share: Share, pages: Allocate) -> FollowingRunner:
    """The runner of another rank, with new pages."""
    kv = pages.new_kv(share.shard.shapes, share.ranks.device)
    runner: FollowingRunner
    if share.load.for_gpu:
        from microturn.model.parallel.gpu_runners import FollowingGpuRunner  # what only a GPU needs

        runner = FollowingGpuRunner(share.model, kv, **share.of_gpu_runner, **pages.of_gpu_runner)
    else:
        runner = FollowingRunner(share.model, kv, decoder=share.decoder)
    runner.ranks = share.ranks
    runner.vocab_size = share.shard.vocab_size
    return runner
