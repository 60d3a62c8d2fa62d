"""What passes of a model tell of its layers, so that a start which knows it needs no such passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Self

from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.model import paged_attention as paged
from microturn.model import rotary_fit
from microturn.model.rotary import Form, Layout, Turning
from microturn.model.rotary_fit import Fit


@dataclass(frozen=True)
class Traits:
    """What passes of a model in float32 tell.

    Attributes:
        layers: shape of each attention layer's KV, by the layer's number in the model.
        rotary: how the rotary module is replaced; None if it stays.
    """

    layers: Mapping[int, LayerShape]
    rotary: Fit | None

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Sequence[LayerShape]) -> Self:
        """Those of a model that was prepared, and whose layers were traced."""
        return cls(dict(zip(paged.numbers_of(model), layers, strict=True)), rotary_fit.fit_of(model))

    def install(self, model: PreTrainedModel) -> None:
        """Gives a model what the passes would."""
        paged.number_layers(model, list(self.layers))
        if self.rotary is not None:
            rotary_fit.install_known(model, self.rotary)

    @classmethod
    def from_json(cls, read: Any) -> Self:
        """Reads what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        layers = {number: LayerShape(*shape) for number, shape in read["layers"]}
        if read["rotary"] is None:
            return cls(layers, None)
        path, form, turnings = read["rotary"]
        pairs = [(kind, None if layout is None else Layout(layout)) for kind, layout in turnings]
        return cls(layers, Fit(path, Form(form), [Turning(*pair) for pair in pairs]))

    def to_json(self) -> Any:
        """The traits in types of JSON."""
        fit = self.rotary
        turnings = [] if fit is None else [(t.kind, None if t.pairs is None else t.pairs.value) for t in fit.turnings]
        return {
            "layers": [(number, astuple(shape)) for number, shape in self.layers.items()],
            "rotary": None if fit is None else (fit.path, fit.form.value, turnings),
        }
