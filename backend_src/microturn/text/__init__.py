"""The text edge: everything between a session's tokens and its user's text.

Read in this order: `session_text` (what the engine calls), `writer` and `encoder` (text to ids), `prepared_text` (long
text, before its turn), `chat` (roles), `decoder` and `stop_strings` (ids to text), `model_text` (what is loaded and
checked once per model).
"""
