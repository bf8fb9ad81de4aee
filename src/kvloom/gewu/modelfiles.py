"""The open files of a model: what was examined is what is loaded, whatever happens to the paths meanwhile."""

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvloom.gewu.codes import Code, Refused, shown

SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf")
NUM_STATES = 4  # sequences that a worker runs at once, if the model's layers keep a state of each
MAX_FILES = 250  # the most descriptors that one message carries


@dataclass(slots=True, eq=False)
class ModelFiles:
    """Owns its descriptors."""

    path: str  # the path as opened, for people
    fds: dict[str, int]  # by name within the folder; "" alone = the path is a file

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()

    def identity(self) -> str:
        """Equal for every path to the same unchanged files; different after one was written to. Raises OSError."""
        digest = hashlib.sha256()
        for name, fd in sorted(self.fds.items()):
            file = os.fstat(fd)
            state = f"\0{file.st_dev}\0{file.st_ino}\0{file.st_size}\0{file.st_mtime_ns}\n"
            digest.update(os.fsencode(name) + state.encode())
        return digest.hexdigest()[:32]

    @contextmanager
    def lay_out(self) -> Iterator[str]:
        """A context with a path at which a process that inherits the descriptors finds the model. Raises OSError."""
        if "" in self.fds:
            yield _path_of(self.fds[""])
            return
        with tempfile.TemporaryDirectory(prefix="gewu-") as folder:
            for name, fd in self.fds.items():
                os.symlink(_path_of(fd), os.path.join(folder, name))
            yield folder


def open_files(fd: int) -> ModelFiles:
    """The files of an open folder, or the open file itself; `fd` stays the caller's. Raises Refused."""
    path = shown(os.readlink(_path_of(fd)))
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    # opening it by path again would use this process's permissions, not the app's
    if flags & (os.O_PATH | os.O_WRONLY):
        raise Refused(Code.NOPERM, f"{path} was not opened to be read")
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return ModelFiles(path, {"": os.dup(fd)})
    if not stat.S_ISDIR(mode):
        raise Refused(Code.INVAL, f"{path} is neither a folder nor a plain file")
    files = ModelFiles(path, {})
    name = ""
    try:
        names = sorted(name for name in os.listdir(fd) if name.endswith(SUFFIXES))
        if len(names) > MAX_FILES:
            raise Refused(Code.INVAL, f"{path} holds {len(names)} model files, more than {MAX_FILES}")
        for name in names:
            _add(files, name, os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd))
    except OSError as error:
        files.close()
        code = Code.NOPERM if isinstance(error, PermissionError) else Code.INVAL
        raise Refused(code, f"{os.path.join(path, name)}: {error.strerror}") from None
    except Refused:
        files.close()
        raise
    return files


def _add(files: ModelFiles, name: str, fd: int) -> None:
    """Add a file; folders, pipes and devices are not part of a model and are skipped."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        files.fds[name] = fd
    else:
        os.close(fd)


def _path_of(fd: int) -> str:
    return f"/proc/self/fd/{fd}"
