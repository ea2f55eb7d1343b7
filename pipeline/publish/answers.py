"""What a hub answers: each failure one sentence, and a wait where it says that it is asked too often.

huggingface_hub waits by itself at some of its calls (uploads, listings), at others not; here all of them do. A refusal
by 429 was not carried out, so it may be asked again whatever the call does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from time import sleep
from typing import Any, TypeVar

from shardmill.pipeline.container.ranges import seconds_asked_for
from shardmill.pipeline.errors import ShardmillError

Found = TypeVar("Found")
_TOO_MANY_REQUESTS = 429
_TRIES = 5


class HubError(ShardmillError):
    """The hub can't be asked, or says no."""


def asked(what: str, ask: Callable[[], Found], let_through: tuple[type[Exception], ...] = ()) -> Found:
    """What the hub answers to `ask`, which is called again where it was one request too many.

    Raises HubError, which begins with `what`, for whatever the library raises (many kinds, of several libraries) but
    for `let_through`.
    """
    for tried in range(_TRIES):
        try:
            return ask()
        except ShardmillError:
            raise
        except Exception as error:
            if isinstance(error, let_through):
                raise
            response = _response(error)
            if status_of(error) != _TOO_MANY_REQUESTS or tried == _TRIES - 1:
                raise HubError(f"{what}: the hub answers: {said(error)}{_advice(error)}") from error
            sleep(seconds_asked_for(response.headers, 2.0**tried))
    raise AssertionError("the last try returns or raises")


def said(error: BaseException) -> str:
    """What the server says, else what the deepest cause does: one line, without what an address might hold of keys."""
    deepest, server = error, getattr(error, "server_message", None)
    while deepest.__cause__ is not None:
        deepest = deepest.__cause__
        server = server or getattr(deepest, "server_message", None)
    text = " ".join(str(deepest).split()) or type(deepest).__name__
    text = re.sub(r" For more information check: \S+", "", text)
    text = re.sub(r"\?\S+", "?...", text)[:300]
    return f"{text}: {' '.join(str(server).split())[:200]}" if server and str(server) not in text else text


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error."""
    response = _response(error)
    return None if response is None else int(response.status_code)


def _response(error: BaseException) -> Any:
    found: BaseException | None = error
    while found is not None:
        if (response := getattr(found, "response", None)) is not None:
            return response
        found = found.__cause__
    return None


def _advice(error: BaseException) -> str:
    status = status_of(error)
    if status in (401, 403):
        return "; log in with a token that may write there (`hf auth login`)"
    if status in (409, 412):
        return "; somebody else has committed meanwhile: run the same command again"
    return "; run the same command again: what was sent is not sent again"
