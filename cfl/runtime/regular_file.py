"""Opens a file in a folder that somebody else may have filled, without following a link or waiting for a pipe."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, flags: int) -> int:
    """Open or create a regular file, and return its descriptor.

    Args:
        path: the file.
        flags: of ``os.open``, such as ``os.O_WRONLY``. An existing file keeps its content.

    Raises:
        OSError: it cannot be opened, or it is a link, a pipe or anything else but a regular file. In a foreign run
            folder, a link would lead to the user's own files, and a pipe would be waited for without end.
    """
    refused = OSError(errno.EINVAL, "it is a link, a pipe or another file than a regular one", str(path))
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise (refused if error.errno in (errno.ELOOP, errno.ENXIO) else error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return descriptor
