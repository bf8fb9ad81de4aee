"""Health: whether new requests are welcome, of the whole server and of each model."""

from dataclasses import dataclass

from kvloom.engine.errors import Overloaded, Unavailable
from kvloom.server.models import Models

BUSY = "Service is alive but busy. Consider reducing request frequency"


@dataclass(slots=True)
class Health:
    """`is_draining` is set when the server has been told to stop: what runs may finish, the rest is refused."""

    models: Models
    is_draining: bool = False

    def check_live(self) -> None:
        """Raises Unavailable."""
        if self.is_draining:
            raise Unavailable("the server is stopping")

    def check(self) -> None:
        """Raises Unavailable when a new request to any model would be refused."""
        self.check_live()
        for service in self.models:
            service.check_ready()

    def check_ready(self) -> None:
        """For balancers: as `check`, and not while the queue is full. Raises Unavailable or Overloaded."""
        self.check()
        if self.models.admission.is_full:
            raise Overloaded(BUSY)
