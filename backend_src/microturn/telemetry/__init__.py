"""What an operator sees of the engine: metrics, lines of a log, spans. None of it knows Triton."""
