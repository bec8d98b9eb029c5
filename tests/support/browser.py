"""A page in a real browser without a screen (Qt's Chromium): a program that prints JSON about the page. Needs PySide6.

python tests/support/browser.py page.html WIDTHxHEIGHT light|dark [screenshot.png]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

WHERE = """(() => {
  const anchor = "point-2", box = document.querySelector(`.plot svg a[href="#${anchor}"]`).getBoundingClientRect();
  const name = document.querySelector(`#${anchor} summary b`).textContent;
  return JSON.stringify({x: box.x + box.width / 2, y: box.y + box.height / 2, anchor, name});
})()"""
HOVERED = """(document.querySelector(".plot > .w:not([hidden])") || {textContent: ""}).textContent"""
SEEN = """JSON.stringify({open: [...document.querySelectorAll("details[open]")].map(e => e.id), hash: location.hash,
  prompts: document.querySelectorAll("details[open] q").length, width: document.documentElement.scrollWidth,
  background: getComputedStyle(document.body).backgroundColor})"""
TIP = """(() => { const token = document.querySelector("details[open] .k"); token.focus();
  const tip = token.querySelector(".w"), box = tip.getBoundingClientRect();
  return JSON.stringify({shown: getComputedStyle(tip).display, text: tip.textContent,
                         inside: box.left >= 0 && box.right <= innerWidth && box.bottom <= innerHeight}); })()"""


def main(file: str, size: str, scheme: str, picture: str = "") -> None:
    os.environ |= {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    dark = " --blink-settings=preferredColorScheme=0" if scheme == "dark" else ""
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu" + dark
    from PySide6.QtCore import QEventLoop, QPoint, Qt, QTimer, QUrl
    from PySide6.QtTest import QTest
    from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    asked, said = list[str](), list[str]()

    class Watch(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, info: object) -> None:  # noqa: N802
            asked.append(info.requestUrl().toString())  # type: ignore[attr-defined]

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level: object, text: str, line: int, source: str) -> None:  # noqa: N802
            if "Info" not in str(level):
                said.append(text)

    application = QApplication(sys.argv[:1])  # noqa: F841 (must live)
    profile, watch = QWebEngineProfile(), Watch()
    profile.setUrlRequestInterceptor(watch)
    page, view = Page(profile), QWebEngineView()
    view.setPage(page)
    view.resize(*map(int, size.split("x")))
    view.show()

    def wait(ms: int) -> None:
        loop = QEventLoop()
        QTimer.singleShot(ms, loop.quit)
        loop.exec()

    def js(code: str) -> str:
        loop, results = QEventLoop(), list[str]()
        page.runJavaScript(code, lambda result: (results.append(result), loop.quit()))
        loop.exec()
        return results[0]

    loop, loaded = QEventLoop(), list[bool]()
    page.loadFinished.connect(lambda well: (loaded.append(well), loop.quit()))
    view.setUrl(QUrl.fromLocalFile(str(Path(file).resolve())))
    loop.exec()
    wait(1500)
    place = json.loads(js(WHERE))
    position, window = QPoint(round(place["x"]), round(place["y"])), view.focusProxy()
    QTest.mouseMove(window, position - QPoint(30, 30))
    wait(200)
    QTest.mouseMove(window, position)
    wait(800)
    hovered = js(HOVERED)
    QTest.mouseClick(window, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier, position)
    wait(1200)
    seen = json.loads(js(SEEN))
    tip = json.loads(js(TIP))
    wait(300)
    if picture:
        view.grab().save(picture)
    print(json.dumps({"loaded": loaded, "errors": said, "asked": asked, "place": place, "hovered": hovered,
                      "seen": seen, "tip": tip}))  # fmt: skip
    sys.stdout.flush()
    os._exit(0)  # ends the process without waiting for Chromium's threads


if __name__ == "__main__":
    main(*sys.argv[1:])
