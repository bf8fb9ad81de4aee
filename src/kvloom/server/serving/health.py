"""Health: whether the server, and each model, answers requests and accepts new ones."""

from dataclasses import dataclass

from kvloom.contract.errors import Overloaded, Unavailable
from kvloom.server.serving.registry import Models

LOADING = "the model is being loaded; try again soon"
BUSY = "Service is alive but busy. Consider reducing request frequency"


@dataclass(slots=True)
class Health:
    """`is_loading` until the models are loaded; `is_draining` after the order to stop: running requests finish, new
    ones are refused.
    """

    models: Models
    is_draining: bool = False
    is_loading: bool = False

    def check_live(self) -> None:
        """Raises Unavailable."""
        if self.is_draining:
            raise Unavailable("the server is stopping")

    def check_loaded(self) -> None:
        """Raises Unavailable."""
        if self.is_loading:
            raise Unavailable(LOADING)

    def check(self) -> None:
        """Raises Unavailable when a new request to any model would be refused."""
        self.check_live()
        self.check_loaded()
        for service in self.models:
            service.check_ready()
        for pictures in self.models.pictures:
            pictures.painter.check_ready()

    def check_ready(self) -> None:
        """For load balancers: as `check`, and also raises while the queue is full. Raises Unavailable or Overloaded."""
        self.check()
        if self.models.admission.is_full:
            raise Overloaded(BUSY)
