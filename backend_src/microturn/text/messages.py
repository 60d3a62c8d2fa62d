"""Opens the messages of a chat as the template does; this ends the message before."""

from __future__ import annotations

from microturn.text.chat import ChatTemplate
from microturn.text.writer import Writer


def open_message(writer: Writer, template: ChatTemplate, previous: str | None, role: str) -> None:
    """Ends the open message and begins one of `role`; text written next is its content.

    Args:
        writer: at the end of the open message, or of text outside any message.
        template: of the model.
        previous: role of the open message; None if there is none.
        role: of the next message; differs from `previous`.

    Errors:
        InvalidArgument: the template does not accept such a message there.
    """
    if previous is None:
        writer.flush()  # text before the first message is not part of it
    transition = template.transition(previous, role, is_context_empty=writer.is_at_start)
    if transition.drops_space_before:
        writer.drop_space_before()
    writer.write_template(transition.text)
    if transition.drops_space_after:
        writer.drop_space_after()
