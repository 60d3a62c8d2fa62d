"""One kernel between a layer's fused projection and its attention, in the language of OpenAI's Triton compiler.

It splits the projection into heads, norms and rotates queries and keys, and writes keys and values into their pages: a
read of the projection and a write of each result, in one launch. `glue.split_heads` and `LayerPages.put` compute the
same in some six kernels, for any shape and device.

A program has one token and some neighbouring heads, all of them queries, keys or values. A head is handled as two
halves, whose elements at the same index turn together (`_halves`), so that it needs no exchange between threads but
for the sum of the norm. A thread reads and writes 16 bytes of 16-bit elements at once.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from microturn.kv.layer_pages import LayerPages
from microturn.model.gpu.glue import Projection

# A program has few heads, so that there are some even for one token, and a thread two loads of 16 bytes at most.
_MOST_ELEMENTS = 1024
_ELEMENTS_OF_THREAD = 16

# The first GPUs that convert to float8 (e4m3) in hardware; Triton compiles it for no earlier ones.
_LEAST_FLOAT8_CAPABILITY = (8, 9)


def covers(projection: Projection, pages: LayerPages) -> bool:
    """Whether the kernel computes this projection into such pages."""
    head_dim = projection.qkv.shape[-1]
    norms = (projection.q_norm, projection.k_norm)
    # A norm of all heads as one vector would need a sum over programs.
    has_head_norms = all(norm is None or len(norm[0]) == head_dim for norm in norms)
    return has_head_norms and head_dim & (head_dim - 1) == 0 and _converts_to(pages.elements)


def append_projection(projection: Projection, pages: LayerPages, places: Tensor) -> Tensor:
    """Writes the keys and values of some tokens into their pages.

    Sums and angles are float32; results are rounded to the type of the projection, and keys and values from there to
    that of the pages as `LayerPages.encode` does.

    Args:
        projection: that the kernel covers.
        pages: of the layer, in HND.
        places: int64 [tokens or more, 2], contiguous: page and offset of each token.

    Returns:
        The queries [tokens, heads, head_dim], contiguous.
    """
    qkv, (cos, sin, is_interleaved) = projection.qkv, projection.angles
    num_tokens, _, head_dim = qkv.shape
    num_heads, num_kv_heads, num_pairs = projection.num_heads, projection.num_kv_heads, cos.shape[-1]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    elements = pages.elements
    dtype = elements.dtype
    q_gain, q_eps = projection.q_norm or (None, 0.0)
    k_gain, k_eps = projection.k_norm or (None, 0.0)
    heads = _heads_of_program(num_heads, num_kv_heads, head_dim)
    _append_projection[num_tokens, (num_heads + 2 * num_kv_heads) // heads](
        qkv,
        q_gain,
        k_gain,
        cos,
        sin,
        places,
        q,
        elements,
        q_eps,
        k_eps,
        *pages.float8,
        qkv.stride(0),
        *elements.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=num_pairs,
        IS_INTERLEAVED=is_interleaved,
        LARGEST=torch.finfo(dtype).max if dtype == torch.float8_e4m3fn else None,
        num_warps=max(1, heads * head_dim // _ELEMENTS_OF_THREAD // 32),
    )
    return q


def _converts_to(elements: Tensor) -> bool:
    if elements.dtype != torch.float8_e4m3fn or not elements.is_cuda:
        return elements.dtype.is_floating_point
    return torch.cuda.get_device_capability(elements.device) >= _LEAST_FLOAT8_CAPABILITY


def _heads_of_program(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """The most heads, a power of two, so that no program has heads of two kinds."""
    common = gcd(num_heads, num_kv_heads)
    return min(common & -common, max(1, _MOST_ELEMENTS // head_dim))


@triton.jit
def _append_projection(
    qkv: tl.tensor,
    q_gain: tl.tensor | None,
    k_gain: tl.tensor | None,
    cos: tl.tensor,
    sin: tl.tensor,
    places: tl.tensor,
    q: tl.tensor,
    elements: tl.tensor,
    q_eps: tl.tensor,
    k_eps: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    token_stride: tl.tensor,
    page_stride: tl.tensor,
    kind_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """See `append_projection`; the grid is [tokens, groups of heads], and other arguments are pointers.

    `kind_stride` lies between a page's keys and its values, `LARGEST` is of the type of the pages if it saturates.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    heads = tl.arange(0, HEADS)[:, None]
    given = qkv + token * token_stride + (first + heads) * HEAD_DIM
    if first < NUM_HEADS:
        to_q = q + (token * NUM_HEADS + first + heads) * HEAD_DIM
        _turn(given, to_q, q_gain, q_eps, cos, sin, token, 1.0, HEADS, HEAD_DIM, NUM_PAIRS, IS_INTERLEAVED, None)
    else:
        page, offset = tl.load(places + 2 * token), tl.load(places + 2 * token + 1)
        of_token = elements + page * page_stride + offset * HEAD_DIM
        head = first - NUM_HEADS
        if head < NUM_KV_HEADS:
            to_k = of_token + (head + heads) * head_stride
            _turn(
                given,
                to_k,
                k_gain,
                k_eps,
                cos,
                sin,
                token,
                k_scale,
                HEADS,
                HEAD_DIM,
                NUM_PAIRS,
                IS_INTERLEAVED,
                LARGEST,
            )
        else:
            to_v = of_token + kind_stride + (head - NUM_KV_HEADS + heads) * head_stride
            at = tl.arange(0, HEAD_DIM)[None, :]
            tl.store(to_v + at, _encoded(tl.load(given + at), elements.dtype.element_ty, v_scale, LARGEST))


@triton.jit
def _turn(
    given: tl.tensor,
    out: tl.tensor,
    gain: tl.tensor | None,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Norms, rotates and stores the heads at some pointers [HEADS, 1]."""
    pair = tl.arange(0, HEAD_DIM // 2)
    rounded: tl.constexpr = given.dtype.element_ty
    # All loads come before the first sum, which waits for them.
    x, y = _halves(given, HEADS, HEAD_DIM, NUM_PAIRS, IS_INTERLEAVED)
    if gain is not None:
        x_gain, y_gain = _halves(gain + tl.zeros((1, 1), tl.int32), 1, HEAD_DIM, NUM_PAIRS, IS_INTERLEAVED)
    if NUM_PAIRS > 0:
        # Pairs that are not turned have no angle.
        angle, has_angle = token * NUM_PAIRS + pair, pair < NUM_PAIRS
        c = tl.load(cos + angle, has_angle, other=1.0)[None, :]
        s = tl.load(sin + angle, has_angle, other=0.0)[None, :]
    if gain is not None:
        to_norm = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / HEAD_DIM + eps)
        x, y = x * to_norm * x_gain, y * to_norm * y_gain
    if NUM_PAIRS > 0:
        x, y = x * c - y * s, y * c + x * s
    to: tl.constexpr = out.dtype.element_ty
    x, y = _encoded(x.to(rounded), to, scale, LARGEST), _encoded(y.to(rounded), to, scale, LARGEST)
    if IS_INTERLEAVED:
        tl.store(out + tl.arange(0, HEAD_DIM)[None, :], tl.interleave(x, y))
    else:
        at, partner = _places(HEAD_DIM, NUM_PAIRS)
        tl.store(out + at, x)
        tl.store(out + partner, y)


@triton.jit
def _halves(
    given: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The elements of heads as two float32 tensors [HEADS, HEAD_DIM // 2]: those at one index are a pair."""
    if IS_INTERLEAVED:
        x = tl.load(given + tl.arange(0, HEAD_DIM)[None, :])
        x, y = tl.split(tl.reshape(x, (HEADS, HEAD_DIM // 2, 2)))
    else:
        at, partner = _places(HEAD_DIM, NUM_PAIRS)
        x, y = tl.load(given + at), tl.load(given + partner)
    return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def _places(HEAD_DIM: tl.constexpr, NUM_PAIRS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where the pairs of a head are if its first `NUM_PAIRS` elements turn with as many behind them.

    What lies behind is paired likewise: any elements, since they do not turn.
    """
    pair = tl.arange(0, HEAD_DIM // 2)
    if NUM_PAIRS == 0 or NUM_PAIRS * 2 == HEAD_DIM:
        at, partner = pair, pair + HEAD_DIM // 2
    else:
        turns = pair < NUM_PAIRS
        at, partner = tl.where(turns, pair, pair + NUM_PAIRS), pair + tl.where(turns, NUM_PAIRS, HEAD_DIM // 2)
        if NUM_PAIRS % 8 == 0:
            at = tl.max_contiguous(tl.multiple_of(at, 8), 8)
            partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
    return at[None, :], partner[None, :]


@triton.jit
def _encoded(x: tl.tensor, to: tl.constexpr, scale: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Numbers in another type; if its largest is given, they are divided by a scale, and those beyond become this."""
    if LARGEST is not None:
        x = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(to)
