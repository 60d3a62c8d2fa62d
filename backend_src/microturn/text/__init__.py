"""Text: tokenization up to safe cuts, chat templates, detokenization, stop strings.

Turns and sessions are above it; the engine calls it through the `codec.Codec` protocol. Open `session_text` first, then
`writer` and `encoder` (text to ids), `prepared_text` (long text, before its turn), `chat` (roles), `detokenizer` and
`stop_strings` (ids to text), and `model_text` (loaded and checked once per model).
"""
