"""The Hugging Face hub, from which timm takes pretrained weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 5.0
"""How long the hub has to answer."""


@contextmanager
def one_try() -> Iterator[bool]:
    """Whether the hub answers, which is asked once; where it does not, only what is in its cache is taken inside.

    Its own client would try again for a minute, file by file.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    offline, answers = constants.HF_HUB_OFFLINE, True
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # of its HTTP library, which is another one from version to version
        answers = False
    constants.HF_HUB_OFFLINE = offline or not answers  # the environment variable is read when the hub is imported
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = offline
