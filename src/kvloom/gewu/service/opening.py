"""Opening: starts a process for a model from the examined files, with retries after the death of an earlier one."""

import asyncio
import logging

from kvloom.contract.errors import ModelError
from kvloom.gewu.protocol.messages import Host, Listeners, Open, Opener
from kvloom.gewu.service.model import Model
from kvloom.processes.keeper import Keeper

log = logging.getLogger(__name__)

CHANGED = "the model's files were changed since this session was created; create a new session"


class FilesChanged(ModelError):
    """The files have changed: trying again does not help."""


async def open_host(model: Model, opener: Opener, setup: Open, on: Listeners, patience_s: float) -> Host:
    """Raises ModelError, also when the files are not, or no longer, those that were examined.

    After the death of a process whose requests wait, it retries until `patience_s` have passed since then.
    """
    keeper = Keeper()
    while True:
        try:
            return await _open_unchanged(model, opener, setup, on)
        except FilesChanged:
            raise
        except ModelError as error:
            left_s = model.patience_left_s(patience_s)
            if not left_s:
                raise
            pause_s = keeper.pause_s()
            log.warning("%s: %s; the next try is in %g s", model.found.path, error, pause_s)
            await asyncio.sleep(min(pause_s, left_s))
        except Exception:  # a bug here, or no thread for it, must not leave apps waiting for ever
            log.exception("%s cannot be loaded", model.found.path)
            raise ModelError("the service failed; its log says more") from None


async def _open_unchanged(model: Model, opener: Opener, setup: Open, on: Listeners) -> Host:
    if not await asyncio.to_thread(model.is_unchanged):
        raise FilesChanged(CHANGED)
    try:
        host = await opener(setup, model.files, on)
    except ModelError:
        if model.is_unchanged():
            raise
        raise FilesChanged(CHANGED) from None  # what it met there is of no use to anyone
    if not model.is_unchanged():
        await host.close()
        raise FilesChanged(CHANGED)
    return host
