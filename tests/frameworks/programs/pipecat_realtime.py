"""Pipecat: a pipeline with OpenAI's realtime service, whose answers are text."""

import asyncio
import json
import os

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.frames.frames import EndFrame, LLMRunFrame, LLMUpdateSettingsFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner
from pipecat_listener import Listener
from weather import DESCRIPTION, NAME, PARAMETERS

calls = []


def settings(tool_choice):
    properties = SessionProperties(output_modalities=["text"], tool_choice=tool_choice)
    return OpenAIRealtimeLLMService.Settings(
        model="smollm2-135m", system_instruction="Answer in one short sentence.", session_properties=properties
    )


async def get_weather(params: FunctionCallParams):
    calls.append({"name": params.function_name, "arguments": params.arguments})
    await params.llm.queue_frame(LLMUpdateSettingsFrame(delta=settings("auto")))
    await params.result_callback("21 degrees and clear")


weather = FunctionSchema(
    NAME, DESCRIPTION, properties=PARAMETERS["properties"], required=PARAMETERS["required"], handler=get_weather
)


async def main():
    llm = OpenAIRealtimeLLMService(
        api_key=os.environ["OPENAI_API_KEY"],
        base_url=os.environ["OPENAI_BASE_URL"].replace("http", "ws", 1) + "/realtime",
        settings=settings("required"),
    )
    context = LLMContext([{"role": "user", "content": "How is the weather in Bern?"}], tools=[weather])
    user, assistant = LLMContextAggregatorPair(context)
    listener = Listener()
    pipeline = Pipeline([user, llm, listener, assistant])
    worker = PipelineWorker(pipeline, params=PipelineParams(enable_metrics=True, enable_usage_metrics=True))

    @assistant.event_handler("on_assistant_turn_stopped")
    async def answered(_, message):
        if message.content:
            await worker.queue_frame(EndFrame())

    @worker.event_handler("on_pipeline_error")
    async def failed(*_):
        await worker.cancel()

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await worker.queue_frame(LLMRunFrame())
    await runner.run()
    print(json.dumps({"pieces": listener.pieces, "call": calls[0], "usage": listener.usage}))


asyncio.run(main())
