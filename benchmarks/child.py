"""A command that this process waits for, and that can be interrupted without a word from it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

# What it says to stderr is shown so much later: what it says to a Ctrl-C, which reaches both processes, is not. That
# `Popen.wait` is interrupted is known 0.25 s after it was.
_DELAY_S = 1.0
_ENDS_BY_ITSELF_S = 5.0


def run(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> int:
    """Its exit status.

    Raises:
        KeyboardInterrupt: as soon as the command has ended, its processes with it.
    """
    interrupted = threading.Event()
    with subprocess.Popen(words, cwd=cwd, env=env, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        shown = threading.Thread(target=_show, args=(process.stderr.fileno(), interrupted), daemon=True)
        shown.start()
        try:
            status = process.wait()
        except KeyboardInterrupt:
            interrupted.set()
            _end(process)
            raise
        finally:
            shown.join()
    return status


def _show(source: int, interrupted: threading.Event) -> None:
    while chunk := os.read(source, 1 << 16):
        if not interrupted.wait(_DELAY_S):
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """A Ctrl-C has reached it as well, and it ends its own processes, in which a second signal would disturb it; a
    signal to this process alone has not.
    """
    try:
        process.wait(_ENDS_BY_ITSELF_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
