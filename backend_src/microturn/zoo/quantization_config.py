"""Where a model directory says how its weights are quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from microturn.errors import InvalidArgument

# Model Optimizer's file; later releases write the same to config.json as well.
MODELOPT_FILE = "hf_quant_config.json"


def read_quantization(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What config.json or a file beside it says of the quantization; None for plain weights.

    Errors:
        InvalidArgument: that file cannot be read.
    """
    if said := config.get("quantization_config"):
        return dict(said)
    path = directory / MODELOPT_FILE
    if not path.is_file():
        return None
    try:
        return {"quant_method": "modelopt", **json.loads(path.read_bytes())["quantization"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} cannot be read as a quantization: {error!r}") from error
