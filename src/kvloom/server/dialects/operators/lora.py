"""LoRA adapters while the server runs: the routes of vLLM's server, for operators."""

from pathlib import Path

import msgspec

from kvloom.checkpoints.lora import CONFIG_FILE, WEIGHTS_FILE
from kvloom.checkpoints.lora_gguf import SUFFIX
from kvloom.contract.errors import BadRequest, NotFound, ServingError
from kvloom.server.dialects.operators.adapter_names import check_name
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.registry import Models


class LoadBody(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replaces an adapter of this name; accepted requests finish with the old one
    base_model_name: str | None = None  # one of several served models; None = the first


class UnloadBody(msgspec.Struct):
    lora_name: str


_load_decoder = msgspec.json.Decoder(LoadBody)
_unload_decoder = msgspec.json.Decoder(UnloadBody)


class LoraAdapters:
    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                *("POST", "/v1/load_lora_adapter", self.load, "Load an adapter", (LoadBody,)),
                is_management=True,
                parse=lambda request: decode_body(_load_decoder, request.body),
            ),
            Endpoint(
                *("POST", "/v1/unload_lora_adapter", self.unload, "Unload an adapter", (UnloadBody,)),
                is_management=True,
                parse=lambda request: decode_body(_unload_decoder, request.body),
            ),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    async def load(self, request: HttpRequest, body: LoadBody) -> Reply:
        """From then on requests choose it by its name. Raises BadRequest, Unavailable."""
        check_name(body.lora_name)
        path = allowed_path(body.lora_path, self._models.options.lora_root)
        try:
            base = self._models.default if body.base_model_name is None else self._models.base(body.base_model_name)
        except NotFound as error:
            raise BadRequest("base_model_name", str(error)) from None
        async with self._models.adapters_lock:
            self._models.check_adapter_name(body.lora_name, body.load_inplace)
            adapter = await base.engine.load_adapter(str(path))
            before = self._models.put_adapter(base.with_adapter(body.lora_name, body.lora_path, adapter.id))
            if before is not None:
                before.unload()
        return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: HttpRequest, body: UnloadBody) -> Reply:
        """Requests that run with it or wait finish. Raises BadRequest, NotFound."""
        async with self._models.adapters_lock:
            self._models.pop_adapter(body.lora_name).unload()
        return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def allowed_path(text: str, root: Path | None) -> Path:
    """The folder or GGUF file that a caller names, absolute or below `root`. Raises BadRequest when it leads outside of
    it. Links are followed, those of the files in it too.
    """
    if root is None:
        raise BadRequest("lora_path", "loading at run time is off; start the server with --lora-root DIR (loraRoot)")
    root = root.resolve()
    try:
        path = (root / text).resolve()
        read = (path, path / CONFIG_FILE, path / WEIGHTS_FILE, *path.glob(f"*{SUFFIX}"))
        is_inside = all(p.resolve().is_relative_to(root) for p in read)
        is_there = is_inside and (path.is_dir() or (path.suffix == SUFFIX and path.is_file()))
    except (OSError, ValueError, RuntimeError):
        raise BadRequest("lora_path", "is no path") from None
    if not is_inside:
        raise BadRequest("lora_path", "must lead to a folder below loraRoot, links followed")
    if not is_there:
        raise BadRequest("lora_path", f"{text} is neither a folder nor a {SUFFIX} file")
    return path


def _said(text: str) -> Reply:
    return Reply(text.encode(), media_type="text/plain; charset=utf-8")
