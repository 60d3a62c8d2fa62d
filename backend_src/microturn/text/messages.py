"""Writes the messages of a chat as its template does: opens the next one, and with it ends the one before."""

from __future__ import annotations

from microturn.text.chat import ChatTemplate
from microturn.text.writer import Writer


def open_message(writer: Writer, template: ChatTemplate, previous: str | None, role: str) -> None:
    """Ends the open message and begins one of `role`; what is written next is its content.

    Args:
        writer: stands behind the open message, or behind text that belongs to none.
        template: the model's.
        previous: the open message's role; None if there is none.
        role: the next message's role, which differs from it.

    Errors:
        InvalidArgument: the template does not take such a message there.
    """
    if previous is None:
        writer.flush()  # text before the first message keeps to itself
    transition = template.transition(previous, role, is_context_empty=writer.is_at_start)
    if transition.drops_space_before:
        writer.drop_space_before()
    writer.write_template(transition.text)
    if transition.drops_space_after:
        writer.drop_space_after()
