"""The sizes of a model that limit sessions: its weights, and the KV of each layer.

Types have their names in the settings. The sums are those of the engine: `LayerGroups` determines a session's pages,
and a unit test compares the rest with the engine's own accounts.
"""

from __future__ import annotations

from dataclasses import dataclass

from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.tensors import KV_DTYPES, KVTensors

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}

# In 8 bits each row of a weight has a scale in float32.
_SCALE_BYTES = 4
# With 8-bit products all that is neither a product nor embeddings is float32: norms, biases.
_OTHER_BYTES = 4


@dataclass(frozen=True)
class ModelShape:
    """A causal language model as a planner sees it.

    Attributes:
        name: of the model.
        num_params: all elements of its weights; weights shared by head and embeddings count once.
        num_product_params: elements of its linear modules, the head included.
        num_product_rows: their output features.
        num_embedding_params: elements of the table of embeddings.
        stored_bytes: of an element in its file, and so of embeddings in memory beside 8-bit products.
        shares_head: whether that table is also the head.
        layers: KV shape and window of each attention layer.
        num_heads: query heads of a layer.
        max_context: context that it was trained for, in tokens.
    """

    name: str
    num_params: int
    num_product_params: int
    num_product_rows: int
    num_embedding_params: int
    stored_bytes: int
    shares_head: bool
    layers: tuple[LayerShape, ...]
    num_heads: int
    max_context: int

    @property
    def num_other_params(self) -> int:
        """Elements outside of products and embeddings: norms, or experts that are not linear modules."""
        head = self.num_embedding_params if self.shares_head else 0
        return self.num_params - (self.num_product_params - head) - self.num_embedding_params

    def weight_bytes(self, weights: str) -> int:
        """Bytes of the weights in memory.

        Args:
            weights: `float32`, `bfloat16` or `int8`; with `int8` a head that shares the embeddings is a copy.
        """
        if weights != "int8":
            return self.num_params * ELEMENT_BYTES[weights]
        return self.step_weight_bytes(weights) + self.num_embedding_params * self.stored_bytes

    def step_weight_bytes(self, weights: str) -> int:
        """Bytes of weights that each step reads: all but the embeddings, of which it reads a few rows."""
        other_bytes = _OTHER_BYTES if weights == "int8" else ELEMENT_BYTES[weights]
        return self.product_bytes(weights) + self.num_other_params * other_bytes

    def product_bytes(self, weights: str) -> int:
        """Bytes of the linear modules, including scales."""
        scale_bytes = self.num_product_rows * _SCALE_BYTES if weights == "int8" else 0
        return self.num_product_params * ELEMENT_BYTES[weights] + scale_bytes

    def token_bytes(self, kv_dtype: str) -> int:
        """Bytes of KV of one token over all layers."""
        return KVTensors.bytes_per_token(self.layers, KV_DTYPES[kv_dtype])

    def visible_bytes(self, kv_dtype: str, context_len: int) -> int:
        """Bytes of KV that a new token after `context_len` tokens attends to: all, or a layer's window."""
        return sum(_layer_token_bytes(layer, kv_dtype) * _num_visible(layer, context_len) for layer in self.layers)

    def session_bytes(self, kv_dtype: str, context_len: int, *, page_size: int, window_slack: int) -> int:
        """Bytes of pages that a session of `context_len` tokens takes between two turns.

        Args:
            kv_dtype: one of `KV_DTYPES`.
            context_len: tokens.
            page_size: tokens in a page.
            window_slack: tokens that sliding-window layers keep beyond their window for rewinds.
        """
        groups = LayerGroups.of(self.layers)
        page_bytes = page_size * sum(_layer_token_bytes(slot, kv_dtype) for slot in groups.slots)
        return groups.session_pages(context_len, page_size, window_slack) * page_bytes

    def token_flops(self, context_len: int) -> int:
        """Floating-point operations of one new token after `context_len` tokens; a multiply-add counts as two."""
        attention = sum(4 * self.num_heads * layer.head_dim * _num_visible(layer, context_len) for layer in self.layers)
        return 2 * (self.num_product_params + self.num_other_params) + attention


def _layer_token_bytes(layer: LayerShape, kv_dtype: str) -> int:
    return KVTensors.bytes_per_token([layer], KV_DTYPES[kv_dtype])


def _num_visible(layer: LayerShape, context_len: int) -> int:
    return context_len if layer.window is None else min(context_len, layer.window)
