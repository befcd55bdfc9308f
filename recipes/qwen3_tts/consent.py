"""Consent: a voice is somebody's, so nothing is trained or cloned before it is said that they agree."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from datetime import date
from typing import Any

CONSENT_FLAG = "--i-have-consent"


def add_consent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        CONSENT_FLAG,
        action="store_true",
        help="states that every speaker has agreed to this use of their recordings, or that they are free for it",
    )
    parser.add_argument(
        "--consent-note", default="", help="on what it rests, e.g. a signed form or a licence; is recorded"
    )


def require_consent(args: argparse.Namespace, speakers: Iterable[str]) -> dict[str, Any]:
    """What is recorded with everything made from the recordings; an error where consent was not stated."""
    named = sorted({speaker.lower() for speaker in speakers})
    if not args.i_have_consent:
        raise ValueError(
            f"a voice may be used only with its speaker's consent: say {CONSENT_FLAG} if "
            f"{' and '.join(named) or 'they'} agreed to it, or the recordings' licence allows it "
            "(--consent-note says which)"
        )
    return {"consent": "stated", "speakers": named, "note": args.consent_note, "date": date.today().isoformat()}
