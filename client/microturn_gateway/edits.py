"""What each job of a realtime session makes of the conversation, and which events tell that it is done.

The text buffer is the one item whose status is `in_progress`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from microturn_gateway import client_events as ask
from microturn_gateway.answer import Event
from microturn_gateway.context import HeldContext, joined
from microturn_gateway.conversation import Conversation, Item, new_id
from microturn_gateway.failures import Refusal

# Text has no milliseconds. Where a client says only how much of an answer's speech was heard, this rate, about 150
# English words a minute, says how much of its text that was.
SPOKEN_CHARS_PER_S = 15


def edited(
    conversation: Conversation, event: ask.ClientEvent, context: HeldContext, *, is_implied: bool
) -> Conversation:
    """The conversation after a job.

    Args:
        conversation: before it.
        event: what the client asks for.
        context: says where answers can be cut.
        is_implied: a commit that another event brought with it, where there may be nothing to commit.

    Raises:
        Refusal: it cannot be done.
    """
    match event:
        case ask.AppendBuffer():
            return _appended(conversation, event)
        case ask.CommitBuffer() | ask.ClearBuffer():
            item = buffered(conversation)
            if item is None and not is_implied:
                raise Refusal("input_text_buffer_empty", "the text buffer is empty")
            if item is None:
                return conversation
            is_commit = isinstance(event, ask.CommitBuffer)
            return (
                conversation.with_changed(replace(item, status="completed"))
                if is_commit
                else conversation.without(item.id)
            )
        case ask.CreateItem():
            return conversation.with_item(event.item, event.previous_id)
        case ask.DeleteItem():
            return conversation.without(event.item_id)
        case ask.TruncateItem():
            return conversation.with_changed(_truncated(conversation.item(event.item_id), event, context))
        case ask.RetrieveItem():
            conversation.item(event.item_id)
    return conversation


def buffered(conversation: Conversation) -> Item | None:
    """The item that the text buffer grows; None while it is empty."""
    return next((item for item in conversation.items if item.status == "in_progress"), None)


def tell(
    event: ask.ClientEvent, before: Conversation, after: Conversation, report: Mapping[str, Any] | None
) -> list[Event]:
    """The events that say that a job is done.

    Args:
        event: what the client asked for.
        before: the conversation before it.
        after: the conversation now.
        report: of the turns that it took, if any.
    """
    match event:
        case ask.AppendBuffer():
            item = buffered(after)
            assert item is not None
            chunk = {"text": event.content} if isinstance(event.content, str) else {"token_ids": list(event.content)}
            return [{"type": "input_text_buffer.appended", "item_id": item.id, **chunk, "microturn": report}]
        case ask.CommitBuffer():
            item = buffered(before)
            if item is None:
                return []
            place = {"previous_item_id": after.id_before(item.id)}
            return [
                {"type": "input_text_buffer.committed", "item_id": item.id, **place},
                *_tell_item(after, item.id),
            ]
        case ask.ClearBuffer():
            return [{"type": "input_text_buffer.cleared"}]
        case ask.CreateItem():
            return _tell_item(after, event.item.id)
        case ask.DeleteItem():
            return [{"type": "conversation.item.deleted", "item_id": event.item_id}]
        case ask.RetrieveItem():
            return [{"type": "conversation.item.retrieved", "item": after.item(event.item_id).as_json()}]
        case ask.TruncateItem():
            truncated: Event = {"type": "conversation.item.truncated", "item_id": event.item_id, "content_index": 0}
            text = after.item(event.item_id).content
            return [{**truncated, "audio_end_ms": event.audio_end_ms, "text": text, "microturn": report}]
    return []


def _tell_item(conversation: Conversation, item_id: str) -> list[Event]:
    told = {
        "previous_item_id": conversation.id_before(item_id),
        "item": conversation.item(item_id).as_json(),
    }
    return [{"type": "conversation.item.added", **told}, {"type": "conversation.item.done", **told}]


def _appended(conversation: Conversation, event: ask.AppendBuffer) -> Conversation:
    item = buffered(conversation)
    if item is None:
        return conversation.with_item(Item(new_id("item"), "user", event.content, "in_progress"))
    content = joined(item.content, event.content)
    if content is None:
        raise Refusal("invalid_value", "one item is text or token ids: commit the buffer before you change")
    return conversation.with_changed(replace(item, content=content))


def _truncated(item: Item, event: ask.TruncateItem, context: HeldContext) -> Item:
    if item.role != "assistant" or item.call_id or not isinstance(item.content, str):
        raise Refusal("invalid_value", "only an answer can be truncated", param="item_id")
    num_chars = event.text_end_chars
    if num_chars is None:
        num_chars = event.audio_end_ms * SPOKEN_CHARS_PER_S // 1000
    if num_chars >= len(item.content):
        return item
    # Between its tokens, so that what stays is what the model said, token by token.
    told = [piece for piece in context.pieces if piece.is_answer and piece.content == item.content]
    cut = told[-1].cut_before(num_chars) if told else None
    return replace(item, content=item.content[: num_chars if cut is None else cut.num_chars], status="incomplete")
