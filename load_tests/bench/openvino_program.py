"""OpenVINO GenAI behind a pipe: lines of JSON come in as requests, and go out as answers.

    {"id": 3, "prompt": [1, 2, …], "num_output": 8}    →    {"id": 3, "token_ids": [5, …]}

Runs in the environment that `openvino` makes, and imports nothing of this project. Usage: ``openvino_program.py GGUF
DIRECTORY``; the model is converted into the directory once: to Q8_0, and from that to OpenVINO's format.
"""

import json
import sys
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import numpy as np
import openvino
import openvino_genai
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

_CACHE_GB = 3
_MOST_BATCHED_TOKENS = 256
_WRITTEN_ANEW = ("general.architecture", "general.file_type", "general.quantization_version")


def to_q8_0(source: Path, target: Path) -> None:
    """Writes a GGUF file of the Llama family with all its matrices in Q8_0."""
    reader, writer = GGUFReader(source), GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _WRITTEN_ANEW:
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        if weight.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(source: Path, directory: Path) -> None:
    """Converts a GGUF file, unless the directory has the result."""
    ready = directory / ".ready"
    if ready.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    to_q8_0(source, directory / "q8_0.gguf")
    openvino_genai.LLMPipeline(directory / "q8_0.gguf", "CPU", enable_save_ov_model=True)
    ready.touch()


def serve(directory: Path) -> None:
    """Answers until standard input ends."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = _MOST_BATCHED_TOKENS
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU")
    requests: Queue[dict[str, Any] | None] = Queue()
    Thread(target=_read, args=(requests,), daemon=True).start()
    running: dict[int, tuple[Any, dict[str, Any], list[int]]] = {}
    print(json.dumps({"ready": True}), flush=True)
    while True:
        try:
            while (request := requests.get(block=not running)) is not None:
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens = config.min_new_tokens = request["num_output"]
                config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
                prompt = openvino.Tensor(np.array([request["prompt"]], np.int64))
                running[request["id"]] = pipeline.add_request(request["id"], prompt, config), request, []
            return
        except Empty:
            pass
        pipeline.step()
        for number, (handle, request, token_ids) in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids
            if len(token_ids) >= request["num_output"]:
                del running[number]
                print(json.dumps({"id": number, "token_ids": token_ids}), flush=True)


def _read(requests: "Queue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    requests.put(None)


if __name__ == "__main__":
    gguf, converted = map(Path, sys.argv[1:])
    convert(gguf, converted)
    serve(converted)
