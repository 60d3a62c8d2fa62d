"""Whether a model's weights are 8-bit floats on a GPU: where its checkpoint has them, or the settings want them."""

from __future__ import annotations

import logging

from torch import nn
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.model.gpu import float8, float8_linear
from microturn.model.gpu.float8_linear import Float8Products
from microturn.model.gpu.published_scales import PublishedScales

log = logging.getLogger(__name__)


def float8_products(
    model: PreTrainedModel, wanted: str, published: PublishedScales, no_fused_reason: str | None
) -> Float8Products | None:
    """What multiplies by 8-bit floats; None where weights are of another type.

    Args:
        model: on its device, with plain weights.
        wanted: the type in the settings.
        published: scales of its checkpoint.
        no_fused_reason: why transformers' own layers run; None if ours do.

    Raises:
        InvalidArgument: they are wanted, and cannot be.
    """
    of_modules = published.of_modules(model)
    if published.weights and not of_modules:
        log.warning("the checkpoint's 8-bit floats are served as plain weights: its names are not those of the model")
    if wanted != "float8" and not (wanted == "auto" and of_modules):
        return None
    reason = float8_linear.unavailable_reason(model.device) or no_fused_reason
    if reason is None:
        return Float8Products(of_modules or None)
    if wanted == "float8":
        raise InvalidArgument(f"setting 'weights' cannot be float8 here: {reason}; set weights=bfloat16")
    log.warning("the checkpoint's 8-bit floats are served in bfloat16: %s", reason)
    return None


def name_of_type(model: PreTrainedModel, products: Float8Products | None, wanted: str) -> str:
    """The type of a model's weights, by its name in the settings, once its products have been made.

    Args:
        model: of the products.
        products: that made them; None without 8-bit floats.
        wanted: the type in the settings.

    Raises:
        InvalidArgument: it is wanted, and no weight has it.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if products is None:
        return dtype
    dtypes = [module.weight.dtype for module in model.modules() if isinstance(module, nn.Linear)]
    num_float8 = sum(of == float8.DTYPE for of in dtypes)
    log.info("%d of %d products have weights in float8, the others in %s", num_float8, len(dtypes), dtype)
    if num_float8 == 0 and wanted == "float8":
        raise InvalidArgument(
            "setting 'weights' cannot be float8 here: no weight of the layers has sides of whole vectors of 16 "
            "elements, and scales that fit it; set weights=bfloat16"
        )
    return "float8" if num_float8 else dtype
