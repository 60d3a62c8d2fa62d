"""Pipecat: a pipeline with OpenAI's chat service."""

import asyncio
import json

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.frames.frames import EndFrame, LLMMessagesAppendFrame, LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.workers.runner import WorkerRunner
from pipecat_listener import Listener
from weather import DESCRIPTION, NAME, PARAMETERS

calls = []
questions = ["And tomorrow?"]


async def get_weather(params: FunctionCallParams):
    calls.append({"name": params.function_name, "arguments": params.arguments})
    params.context.set_tool_choice("auto")
    await params.result_callback("21 degrees and clear")


weather = FunctionSchema(
    NAME, DESCRIPTION, properties=PARAMETERS["properties"], required=PARAMETERS["required"], handler=get_weather
)


async def main():
    llm = OpenAILLMService(settings=OpenAILLMService.Settings(model="smollm2-135m", max_completion_tokens=64))
    context = LLMContext(
        [{"role": "user", "content": "How is the weather in Bern?"}],
        tools=[weather],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    user, assistant = LLMContextAggregatorPair(context)
    listener = Listener()
    pipeline = Pipeline([user, llm, listener, assistant])
    worker = PipelineWorker(pipeline, params=PipelineParams(enable_metrics=True, enable_usage_metrics=True))

    @assistant.event_handler("on_assistant_turn_stopped")
    async def answered(_, message):
        if questions and message.content:
            question = {"role": "user", "content": questions.pop()}
            await worker.queue_frame(LLMMessagesAppendFrame([question], run_llm=True))
        elif message.content:
            await worker.queue_frame(EndFrame())

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await worker.queue_frame(LLMRunFrame())
    await runner.run()
    print(json.dumps({"pieces": listener.pieces, "call": calls[0], "usage": listener.usage}))


asyncio.run(main())
