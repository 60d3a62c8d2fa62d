"""The client's own protobuf messages, beside those of Triton's client: the same on the wire, as far as they go."""

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from microturn_client import _messages_pb2 as messages

NAMES = list(messages.DESCRIPTOR.message_types_by_name)


def tritons(name: str) -> Descriptor:
    module = service_pb2 if hasattr(service_pb2, name) else model_config_pb2
    return getattr(module, name).DESCRIPTOR


def described(field: FieldDescriptor) -> tuple[object, ...]:
    kind = field.message_type and field.message_type.name
    choice = field.containing_oneof and field.containing_oneof.name
    return field.number, field.type, field.is_repeated, kind, choice


def fields(message: Descriptor) -> dict[str, tuple[object, ...]]:
    """Of a message and those inside of it."""
    own = {f"{message.name}.{field.name}": described(field) for field in message.fields}
    for nested in message.nested_types:
        own |= {f"{message.name}.{name}": field for name, field in fields(nested).items()}
    return own


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_tritons(name):
    ours = fields(messages.DESCRIPTOR.message_types_by_name[name])
    theirs = fields(tritons(name))
    assert ours.items() <= theirs.items()


def test_what_one_writes_the_other_reads():
    request = messages.ModelInferRequest(model_name="streaming_llm", id="7", raw_input_contents=[b"\1\0\0\0"])
    request.parameters["sequence_id"].int64_param = 2**62
    request.parameters["temperature"].double_param = 0.5
    request.inputs.add(name="input_ids", datatype="INT32", shape=(1, 1))
    read = service_pb2.ModelInferRequest.FromString(request.SerializeToString())
    assert (read.model_name, read.id, list(read.raw_input_contents)) == ("streaming_llm", "7", [b"\1\0\0\0"])
    assert read.parameters["sequence_id"].int64_param == 2**62
    assert read.parameters["temperature"].double_param == 0.5
    assert (read.inputs[0].name, list(read.inputs[0].shape)) == ("input_ids", [1, 1])
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.model_name = "not of our messages"
    response.infer_response.id = "7"
    response.infer_response.parameters["triton_final_response"].bool_param = True
    response.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=(1, 1))
    response.infer_response.raw_output_contents.append(b"\2\0\0\0")
    told = messages.ModelStreamInferResponse.FromString(response.SerializeToString()).infer_response
    assert (told.id, told.outputs[0].name, told.raw_output_contents[0]) == ("7", "output_ids", b"\2\0\0\0")
    assert told.parameters["triton_final_response"].bool_param
