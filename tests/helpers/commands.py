"""`python launch.py <arguments>` in this process, without the seconds that a new one takes for its imports."""

import os
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from hydra.core.global_hydra import GlobalHydra

from immunization.__main__ import start


class Ended(NamedTuple):
    """What a process leaves."""

    returncode: int
    stdout: str
    stderr: str


def launched(*arguments: str, cwd: Path) -> Ended:
    """The command in the folder `cwd`; environment and working folder are afterwards what they were."""
    out, err, code = StringIO(), StringIO(), 0
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", ["launch.py", *arguments]),
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        GlobalHydra.instance().clear()
        try:
            start()
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):  # which Python prints
                print(code, file=sys.stderr)
                code = 1
    return Ended(code, out.getvalue(), err.getvalue())
