"""Pipecat: spoken questions, spoken answers. Recognition and synthesis run here, a session is in between."""

import asyncio
import io
import json
import subprocess
import wave

import numpy as np
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import (
    EndFrame,
    InputAudioRawFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.processors.audio.vad_processor import VADProcessor
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.stt_service import SegmentedSTTService
from pipecat.services.tts_service import TTSService
from pipecat.turns.user_stop.speech_timeout_user_turn_stop_strategy import SpeechTimeoutUserTurnStopStrategy
from pipecat.turns.user_turn_strategies import UserTurnStrategies
from pipecat.utils.time import time_now_iso8601
from pipecat.workers.runner import WorkerRunner
from pipecat_listener import Listener
from pocketsphinx import Decoder

RATE = 16_000
CHUNK_S = 0.02
QUESTIONS = ["What is the weather like in the city today?", "And what will it be tomorrow?"]


def spoken(text):
    """A text as 16-bit samples, by eSpeak NG."""
    said = subprocess.run(["espeak-ng", "-v", "en-us", "--stdout", text], capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(said)) as file:
        samples, rate = np.frombuffer(file.readframes(2**31 - 1), np.int16), file.getframerate()
    moments = np.arange(int(len(samples) * RATE / rate)) * rate / RATE
    return np.interp(moments, np.arange(len(samples)), samples).astype(np.int16).tobytes()


class Sphinx(SegmentedSTTService):
    """Speech to text, by PocketSphinx. In a product: Pipecat's `WhisperSTTService`, or a service's."""

    wants_wav_segments = False

    def __init__(self):
        super().__init__(sample_rate=RATE)
        self._decoder = Decoder(samprate=RATE, loglevel="FATAL")

    def _heard(self, audio):
        self._decoder.start_utt()
        self._decoder.process_raw(audio, full_utt=True)
        self._decoder.end_utt()
        said = self._decoder.hyp()
        return said.hypstr if said else ""

    async def run_stt(self, audio):
        yield TranscriptionFrame(await asyncio.to_thread(self._heard, audio), "", time_now_iso8601())


class Espeak(TTSService):
    """Text to speech, by eSpeak NG. In a product: Pipecat's `PiperTTSService`, or a service's."""

    def __init__(self):
        super().__init__(sample_rate=RATE, push_start_frame=True, push_stop_frames=True)

    async def run_tts(self, text, context_id):
        yield TTSAudioRawFrame(await asyncio.to_thread(spoken, text), RATE, 1, context_id=context_id)


class Loudspeaker(FrameProcessor):
    """The end of the pipeline: how much was said, and when all of an answer was."""

    def __init__(self):
        super().__init__()
        self.seconds = []
        self.has_spoken = asyncio.Event()

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.seconds.append(len(frame.audio) / 2 / RATE)
        elif isinstance(frame, TTSStoppedFrame):
            self.has_spoken.set()
        await self.push_frame(frame, direction)


async def speak(worker, audio):
    """As a microphone: each chunk when it is said, and silence behind it."""
    chunk_len = int(RATE * CHUNK_S) * 2
    audio += bytes(2 * RATE * 2)
    for first in range(0, len(audio), chunk_len):
        await worker.queue_frame(InputAudioRawFrame(audio[first : first + chunk_len], RATE, 1))
        await asyncio.sleep(CHUNK_S)


async def main():
    context = LLMContext([{"role": "system", "content": "You answer in one short sentence."}])
    stops = UserTurnStrategies(stop=[SpeechTimeoutUserTurnStopStrategy()])
    user, assistant = LLMContextAggregatorPair(context, user_params=LLMUserAggregatorParams(user_turn_strategies=stops))
    llm = OpenAILLMService(settings=OpenAILLMService.Settings(model="smollm2-135m", max_completion_tokens=32))
    hears, listener, loudspeaker = VADProcessor(vad_analyzer=SileroVADAnalyzer()), Listener(), Loudspeaker()
    pipeline = Pipeline([hears, Sphinx(), user, llm, listener, Espeak(), loudspeaker, assistant])
    params = PipelineParams(enable_metrics=True, enable_usage_metrics=True, audio_in_sample_rate=RATE)
    worker = PipelineWorker(pipeline, params=params)

    async def talk():
        for question in QUESTIONS:
            loudspeaker.has_spoken.clear()
            await speak(worker, await asyncio.to_thread(spoken, question))
            await asyncio.wait_for(loudspeaker.has_spoken.wait(), 60)
        await worker.queue_frame(EndFrame())

    runner = WorkerRunner()
    await runner.add_workers(worker)
    talking = asyncio.create_task(talk())
    await runner.run()
    await talking
    heard = [message["content"] for message in context.get_messages() if message["role"] == "user"]
    print(json.dumps({"heard": heard, "usage": listener.usage, "said_s": loudspeaker.seconds}))


asyncio.run(main())
