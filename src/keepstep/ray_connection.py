"""Connects this process to Ray, quietly: to one that runs, with the token that it may ask for, or to a new one."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keepstep.signals import signals_kept

NEW = "local"
"""What Ray takes for an address to start one, also where there is one on this machine: it may be anybody's."""


def connect(address: str, **settings: Any) -> None:
    """`settings`: what else `ray.init` takes. Raises ConnectionError if there is no Ray, or it lets nobody in."""
    import ray

    if address == NEW:
        settings["include_dashboard"] = False
    else:
        address = _found(address)
        _show_token_if_asked(address)
    with signals_kept():  # Ray takes SIGTERM for itself; the supervisor has a better use for it
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **settings)


@contextmanager
def native_output_hidden() -> Iterator[None]:
    """Ray's C++ writes into our output what it finds remarkable."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)


def _found(address: str) -> str:
    """The address as host:port, where somebody listens: Ray itself tries for half a minute before it gives up."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found: str | None = canonicalize_bootstrap_address(address)
    except ValueError as error:
        raise ConnectionError(str(error)) from None
    if found is None:
        raise ConnectionError("no Ray runs on this machine")
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None
    return found


def _show_token_if_asked(address: str) -> None:
    """Ray shows it unasked to any Ray that it finds by itself, which one without tokens does not survive, and never to
    one that it is told of."""
    from ray._private.authentication import authentication_token_setup as setup

    if _lets_in(address):
        return
    logging.getLogger(setup.__name__).setLevel(logging.ERROR)
    if not setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
        found = "this user has none"
    elif not _lets_in(address):
        found = "the one that this user has is another"
    else:
        return
    raise ConnectionError(f"it asks for a token and {found}: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file")


def _lets_in(address: str) -> bool:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RpcError

    try:
        with native_output_hidden():
            GcsClient(address=address)
    except AuthenticationError:
        return False
    except RpcError as error:
        raise ConnectionError(f"who answers is not Ray: {error}") from None
    return True
