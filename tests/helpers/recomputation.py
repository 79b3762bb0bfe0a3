"""docs/recompute.py as a module: no package holds it."""

import importlib.util
import sys

from helpers.repository import ROOT

SCRIPT = ROOT / "docs" / "recompute.py"
spec = importlib.util.spec_from_file_location("recompute", SCRIPT)
recompute = sys.modules["recompute"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recompute)
