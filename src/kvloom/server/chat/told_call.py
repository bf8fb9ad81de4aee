"""One call on its way from its reader to an answer's events."""

from kvloom.server.chat.answer_events import AnswerEvents
from kvloom.server.chat.call_readers import MarkedReader
from kvloom.server.chat.json_calls import CallScanner, CheckedScanner


class ToldCall:
    """A call being read: its scanner, and whether its start was reported."""

    def __init__(self, scanner: CallScanner | CheckedScanner | MarkedReader, events: AnswerEvents) -> None:
        self._scanner, self._events = scanner, events
        self.is_told = False

    @property
    def raw(self) -> str:
        return self._scanner.raw

    @property
    def is_over(self) -> bool:
        return self._scanner.is_done or self._scanner.is_failed

    @property
    def is_failed(self) -> bool:
        return self._scanner.is_failed

    def take(self, char: str) -> None:
        arguments = self._scanner.take(char)
        if self._scanner.name is not None and not self.is_told:
            self.is_told = True
            self._events.start(self._scanner.name)
        if arguments:
            self._events.arguments(arguments)
        if self.is_told and self.is_over:
            self._events.end_call(is_whole=not self.is_failed)

    def cut(self, is_cut: bool) -> str:
        """No more text comes: report the call if it has a name, and close its arguments. Returns what of its text is
        behind the call.
        """
        rest = ""
        if self._scanner.found_name is not None and not self.is_told:
            self.is_told = True
            self._events.start(self._scanner.found_name)
        if self.is_told:
            if isinstance(self._scanner, MarkedReader):
                arguments, rest = self._scanner.close(is_cut)
                self._events.arguments(arguments)
            self._events.end_call(is_whole=False)
        return rest
