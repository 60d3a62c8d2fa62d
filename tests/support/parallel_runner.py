"""A model over several processes for tests: its runner, like `driver.model_runner`'s, and the processes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerGroups
from microturn.kv.page_layout import PageLayout
from microturn.model.cpu import stored_model
from microturn.model.parallel.commands import Allocate, Load
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.runners import LeadingRunner, leading_runner
from microturn.model.parallel.shards import require_cuttable
from microturn.model.parallel.share import Share
from microturn.model.tracing import trace
from support.rounded import exact_of


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="microturn-shared-models-")


@cache
def _saved(model: PreTrainedModel) -> str:
    """A directory with a model, which the other processes load their shares from."""
    path = Path(_directory().name, str(id(model)))
    model.save_pretrained(path)
    return str(path)


def parallel_runner(
    followers: Followers,
    model: PreTrainedModel,
    *,
    num_pages: int = 512,
    page_size: int = 16,
    layout: PageLayout = PageLayout.PANELS,
    kv_dtype: torch.dtype = torch.float32,
) -> LeadingRunner:
    """A runner over a copy of a model, cut for this process and the followers; it takes the place of the one before.

    Args:
        followers: the other processes.
        model: as `driver.model_runner` takes it, on a CPU; not changed.
        num_pages: for each group of its layers.
        layout: in HND it runs as on a GPU.
    """
    exact = exact_of(model)
    directory = _saved(model if exact is None else exact)
    read = stored_model.read_model(directory)
    layers, scores = trace(read)
    require_cuttable(read, layers, followers.size)
    load = Load(directory, "float32" if exact is None else "int8", layers, read.model.rotary_emb)
    if layout is PageLayout.HND:  # as on a GPU
        load = replace(load, for_gpu=True, scores=scores)
    share = Share.of_leader(read, load, followers)
    num_pages = LayerGroups.of(layers).num_groups * num_pages + load.for_gpu
    followers.is_serving = True
    return leading_runner(share, followers, Allocate(num_pages, page_size, kv_dtype, layout, max_tokens=1024))
