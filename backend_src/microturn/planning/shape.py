"""The sizes of a model that limit sessions: its weights, the KV of each layer, and recurrent states.

Types have their names in the settings. The sums are those of the engine: `PageNeeds` determines a session's pages, and
a unit test compares the rest with the engine's own accounts.
"""

from __future__ import annotations

from dataclasses import dataclass

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_needs import PageNeeds
from microturn.kv.tensors import KV_DTYPES, KVTensors

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}

# In 8 bits each row of a weight has a scale in float32.
_SCALE_BYTES = 4
# With 8-bit products all that is neither a product nor embeddings is float32: norms, biases.
_OTHER_BYTES = 4


@dataclass(frozen=True)
class Experts:
    """The experts of all layers of a mixture.

    Attributes:
        num_params: elements of their weights.
        num_rows: output features of these.
        chosen_share: of a layer's experts that one token chooses.
    """

    num_params: int = 0
    num_rows: int = 0
    chosen_share: float = 1.0

    def unread_share(self, num_tokens: int) -> float:
        """The share of experts that none of so many tokens chooses, when each chooses by chance."""
        return (1 - self.chosen_share) ** num_tokens


@dataclass(frozen=True)
class ModelShape:
    """A causal language model as a planner sees it.

    Attributes:
        name: of the model.
        num_params: all elements of its weights; weights shared by head and embeddings count once.
        num_product_params: elements of its linear modules and experts, the head included.
        num_product_rows: their output features.
        num_embedding_params: elements of the table of embeddings.
        stored_bytes: of an element in its file, and so of embeddings in memory beside 8-bit products.
        shares_head: whether that table is also the head.
        layers: KV shape and window of each attention layer.
        num_heads: query heads of a layer.
        max_context: context that it was trained for, in tokens.
        num_layers: of it, with and without KV.
        experts: those among the products.
        state_bytes: of a session's state of the recurrent layers, in float32, as on a CPU.
        is_latent: whether its KV are latent vectors, which a server has in 16 bits unless told otherwise.
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
    num_layers: int
    experts: Experts = Experts()
    state_bytes: int = 0
    is_latent: bool = False

    @property
    def num_other_params(self) -> int:
        """Elements outside of products and embeddings: norms, biases of experts."""
        head = self.num_embedding_params if self.shares_head else 0
        return self.num_params - (self.num_product_params - head) - self.num_embedding_params

    def weight_bytes(self, weights: str) -> int:
        """Bytes of the weights in memory.

        Args:
            weights: `float32`, `bfloat16` or `int8`; with `int8` a head that shares the embeddings is a copy.
        """
        if weights != "int8":
            return self.num_params * ELEMENT_BYTES[weights]
        return self.product_bytes(weights) + self._other_bytes(weights) + self.num_embedding_params * self.stored_bytes

    def step_weight_bytes(self, weights: str, num_tokens: int) -> int:
        """Bytes of weights that a step of so many tokens reads.

        All but the embeddings, of which it reads a few rows, and the experts that no token chooses.
        """
        experts = self.experts
        unread_bytes = experts.unread_share(num_tokens) * _bytes_of(experts.num_params, experts.num_rows, weights)
        return self.product_bytes(weights) + self._other_bytes(weights) - round(unread_bytes)

    def product_bytes(self, weights: str) -> int:
        """Bytes of the linear modules and experts, including scales."""
        return _bytes_of(self.num_product_params, self.num_product_rows, weights)

    def token_bytes(self, kv_dtype: str) -> int:
        """Bytes of KV of one token over all layers."""
        return KVTensors.bytes_per_token(self.layers, KV_DTYPES[kv_dtype])

    def visible_bytes(self, kv_dtype: str, context_len: int) -> int:
        """Bytes that a new token after `context_len` tokens brings from memory and back.

        The KV that it attends to, all or a layer's window; and the recurrent state, there and back.
        """
        of_kv = sum(_layer_token_bytes(layer, kv_dtype) * _num_visible(layer, context_len) for layer in self.layers)
        return of_kv + 2 * self.state_bytes

    def needs(self, kv_dtype: str, *, page_size: int, window_slack: int) -> PageNeeds:
        """The pages that sessions take.

        Args:
            kv_dtype: one of `KV_DTYPES`.
            page_size: tokens in a page.
            window_slack: tokens that layers with a window of their own keep beyond it for rewinds.
        """
        of_pages = {"page_size": page_size, "window_slack": window_slack}
        return PageNeeds.of(self.layers, self.state_bytes, KV_DTYPES[kv_dtype], **of_pages)

    def token_flops(self, context_len: int) -> int:
        """Floating-point operations of one new token after `context_len` tokens; a multiply-add counts as two."""
        attention = sum(4 * self.num_heads * layer.head_dim * _num_visible(layer, context_len) for layer in self.layers)
        unread = self.experts.unread_share(1) * self.experts.num_params
        return 2 * (self.num_product_params - round(unread) + self.num_other_params) + attention

    def _other_bytes(self, weights: str) -> int:
        """Bytes of what is neither a product nor embeddings."""
        return self.num_other_params * (_OTHER_BYTES if weights == "int8" else ELEMENT_BYTES[weights])


def _bytes_of(num_params: int, num_rows: int, weights: str) -> int:
    """Bytes of products in a type, including scales."""
    return num_params * ELEMENT_BYTES[weights] + (num_rows * _SCALE_BYTES if weights == "int8" else 0)


def _layer_token_bytes(layer: LayerShape, kv_dtype: str) -> int:
    return KVTensors.bytes_per_token([layer], KV_DTYPES[kv_dtype])


def _num_visible(layer: LayerShape, context_len: int) -> int:
    return context_len if layer.window is None else min(context_len, layer.window)
