"""A chat in the terminal against any OpenAI-compatible server: streaming, history, Ctrl-C stops the answer only."""

import json
from collections.abc import Callable, Generator, Iterator

import httpx
from rich.console import Console

from kvloom.client.address import why_not_listed
from kvloom.contract.errors import ServingError

HELP = "/reset begins anew, /exit (or Ctrl-D) ends; Ctrl-C stops an answer"


class ChatFailed(ServingError):
    """The server refused, or went away."""


class Chat:
    """One conversation. `client` has the server's base URL; `temperature`: 0 to 2, None = the server's own."""

    def __init__(self, client: httpx.Client, model: str, temperature: float | None = None) -> None:
        self._client = client
        self._asked = {"model": model} | ({} if temperature is None else {"temperature": temperature})
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        self.messages = []

    def ask(self, text: str) -> Generator[str]:
        """Yield the answer's pieces. What was received stays in the history even when the iteration is broken off."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {**self._asked, "messages": self.messages, "stream": True}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    status = f"the server answered {response.status_code} {response.reason_phrase}"
                    raise ChatFailed(_message_of(response.read()) or status)
                for line in response.iter_lines():
                    if line.startswith("data:") and (data := line[len("data:") :].strip()) != "[DONE]":
                        yield from _pieces(data)
        except httpx.HTTPError as error:
            raise ChatFailed(f"the server cannot be reached: {error}") from None
        except UnicodeEncodeError:
            raise ChatFailed("the message cannot be sent: it holds half a character") from None


def first_model(client: httpx.Client) -> str:
    """The name of the first model that the server has. Raises ChatFailed."""
    try:
        response = client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ChatFailed(f"{client.base_url} does not list its models: {why_not_listed(error)}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ChatFailed(f"{client.base_url} does not answer like an OpenAI server: {error}") from None


def run(chat: Chat, console: Console, read: Callable[[str], str] = input) -> None:
    """Ask and answer until /exit or the end of input."""
    console.print(HELP, style="dim")
    while True:
        try:
            text = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/exit":
            return
        if text == "/reset":
            chat.reset()
            console.print("a new conversation", style="dim")
        elif text.startswith("/"):
            console.print(HELP, style="dim")
        elif text:
            _answer(chat, console, text)


def _answer(chat: Chat, console: Console, text: str) -> None:
    pieces = chat.ask(text)
    try:
        for piece in pieces:
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [stopped]", style="dim", markup=False, end="")
    except ChatFailed as error:
        console.print(str(error), style="red", markup=False, end="")
    finally:
        pieces.close()
    console.print()


def _pieces(data: str) -> list[str]:
    """The texts of an event. Raises ChatFailed, also when the event is not one of this protocol."""
    try:
        chunk = json.loads(data)
        if "error" not in chunk:
            texts = (choice["delta"].get("content") for choice in chunk.get("choices", []))
            return [str(text) for text in texts if text]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ChatFailed(f"the server sent what is no part of a chat: {data[:200]}") from None
    raise ChatFailed(_message_of(data.encode()))


def _message_of(body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        message = None
    return message if isinstance(message, str) else body.decode("utf-8", errors="replace")[:200]
