"""What the two programs with Pipecat listen to."""

from pipecat.frames.frames import LLMTextFrame, MetricsFrame
from pipecat.metrics.metrics import LLMUsageMetricsData
from pipecat.processors.frame_processor import FrameProcessor


class Listener(FrameProcessor):
    """Behind the model: the text that it says, and the tokens of each answer."""

    def __init__(self):
        super().__init__()
        self.pieces = []
        self.usage = []

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMTextFrame):
            self.pieces.append(frame.text)
        elif isinstance(frame, MetricsFrame):
            for used in (data.value for data in frame.data if isinstance(data, LLMUsageMetricsData)):
                self.usage.append([used.prompt_tokens, used.cache_read_input_tokens, used.completion_tokens])
        await self.push_frame(frame, direction)
