"""Answers every turn at once with its own tokens; with a ``fault`` it fails to start in one of the ways models do."""

import json
import os
import ssl  # noqa: F401  loads only with the libpython of this very interpreter
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils  # noqa: TID251

import microturn  # noqa: F401  found from inside the model process


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        fault = parameters["fault"]["string_value"]
        if fault == "raise":
            raise ValueError("the weights are not what they should be")
        if fault == "exit":
            os._exit(3)
        if fault == "exit once":
            marker = Path(__file__).with_name("has_died")
            if not marker.exists():
                marker.touch()
                os._exit(3)
        settings = {name: value["string_value"] for name, value in sorted(parameters.items())}
        print("settings:", json.dumps(settings), flush=True)
        self._fault = fault

    def execute(self, requests):
        for request in requests:
            if self._fault == "refuse":
                error = pb_utils.TritonError("INTERNAL: the engine has stopped")
                request.get_response_sender().send(
                    pb_utils.InferenceResponse([], error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                )
                continue
            tokens = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            status = json.dumps({"finish_reason": "closed" if request.flags() & 2 else "append"}).encode()
            request.get_response_sender().send(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("output_ids", tokens),
                        pb_utils.Tensor("status", np.array([[status]], dtype=np.object_)),
                    ]
                ),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
