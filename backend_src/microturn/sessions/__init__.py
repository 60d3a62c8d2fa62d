"""Sessions: what one is made of, and the table of those that live.

It knows tokens, text states, pages and options; it knows no scheduling, no files and no wire. Open `session` first,
then `turn` (what a client asks, and how that goes) and `intake` (how a turn's input is appended and rolled back). A
session's tokens are in `context`, its text in `history`, its owner in `ownership`, its answers in `results`;
`environment` opens it.
"""
