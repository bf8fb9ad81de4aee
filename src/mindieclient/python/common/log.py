"""`Log(__name__).getlog()`: a logger that prints without further configuration."""

import logging


class Log:
    """Lines go to stderr, unless the program has configured logging, whose handlers are then kept."""

    def __init__(self, logger_name: str = "mindieclient", level: int = logging.INFO) -> None:
        self._logger = logging.getLogger(logger_name)
        if not self._logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] [%(name)s] %(message)s"))
            self._logger.addHandler(handler)
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(level)

    def getlog(self) -> logging.Logger:
        """The logger of the standard library."""
        return self._logger
