"""The engine: one thread that runs the turns of all sessions through the model.

    request_handler ──▶ lifecycle ──▶ scheduler ──▶ steps ──▶ lifecycle ──▶ answers

It knows sessions, pages, tiers and the model; text belongs to the codecs, the wire to `triton`. All but the first
methods of `Engine` belong to the engine's thread. Open `engine` first (the loop), then `lifecycle` (the states of a
session). `wiring` builds the parts, `preparation` has turns that wait for files or long text, `maintenance` serves the
operator.
"""
