"""Models that are converted: embedded ones, GGUF files, quantized weights. Each becomes a plain directory in a cache.

It imports nothing of the engine. Open `store` first.
"""
