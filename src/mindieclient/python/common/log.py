"""`Log(__name__).getlog()`: a logger that shows something without any set-up."""

import logging


class Log:
    """A program that has configured logging itself keeps its own handlers; otherwise lines go to stderr."""

    def __init__(self, logger_name: str = "mindieclient", level: int = logging.INFO) -> None:
        self._logger = logging.getLogger(logger_name)
        if not self._logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] [%(name)s] %(message)s"))
            self._logger.addHandler(handler)
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(level)

    def getlog(self) -> logging.Logger:
        return self._logger
