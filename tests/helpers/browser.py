"""A page in a real browser, Qt's Chromium (extra `browser`), in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MEASURE = """(said => {
  const texts = [...document.querySelectorAll("body *")].filter(
    e => !["SCRIPT", "STYLE", "TITLE"].includes(e.tagName)
      && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length);
  const size = e => {
    const svg = e.closest("svg"), scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    return parseFloat(getComputedStyle(e).fontSize) * scale;
  };
  const root = document.documentElement;
  return JSON.stringify({overflow: root.scrollWidth - root.clientWidth, width: root.clientWidth,
                         smallest: Math.min(...texts.map(size)), said});
})"""


def look(page: Path, picture: Path, width: int, script: str = "null") -> dict[str, Any]:
    """Draw `page` at `width` pixels into `picture`; its `overflow`, `smallest` text and inner `width` in pixels.

    `said` is what `script` returns, which runs before.
    """
    quiet = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox --disable-gpu"}
    command = [sys.executable, __file__, page, picture, str(width), script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=os.environ | quiet)
    return json.loads(done.stdout.splitlines()[-1])


def _main(page: str, picture: str, width: str, script: str) -> None:
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    app = QApplication([])
    view = QWebEngineView()
    view.resize(int(width), 2400)

    def found(text: str) -> None:
        print(text)
        view.grab().save(picture)
        app.quit()

    def loaded(_: bool) -> None:
        QTimer.singleShot(500, lambda: view.page().runJavaScript(f"{MEASURE}({script})", 0, found))

    view.loadFinished.connect(loaded)
    view.load(QUrl.fromLocalFile(str(Path(page).resolve())))
    view.show()
    app.exec()


if __name__ == "__main__":
    _main(*sys.argv[1:])
