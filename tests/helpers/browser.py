"""A real headless Chromium for tests. It opens a file, clicks, takes pictures, and tells what went wrong.

It is driven by the DevTools protocol over a pipe, and cannot reach the network. No wait is longer than `PATIENCE`.
"""

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from helpers import chromium

PATIENCE = 30.0  # seconds
FLAGS = """--headless --no-sandbox --no-zygote --disable-gpu --no-first-run --no-default-browser-check --hide-scrollbars
    --disable-background-networking --disable-component-update --disable-sync --disable-quic --disable-extensions
    --disable-breakpad --disable-dev-shm-usage --no-proxy-server --remote-debugging-pipe"""
CENTRE = """(() => {
    const name = %s, element = document.querySelector(name);
    if (!element) throw Error("nothing matches " + name);
    element.scrollIntoView({block: "center", inline: "center", behavior: "instant"});
    const box = element.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
    const hit = document.elementFromPoint(x, y);
    if (!element.contains(hit)) throw Error(name + " is hidden, or covered by " + (hit && hit.outerHTML.slice(0, 80)));
    return {x, y};
})()"""


class Browser:
    """A Chromium of its own, with an empty profile: `with Browser() as browser: page = browser.open(path)`."""

    def __enter__(self):
        program, extra = chromium.find()
        self._folder = tempfile.TemporaryDirectory(prefix="featureflock-chromium-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log")
        self._count, self._answers, self._pages, self._rest = 0, {}, {}, b""
        arguments = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={self._folder.name}/profile"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(  # it speaks on descriptors 3 and 4
                ["sh", "-c", 'exec "$@" 3<&0 4>&1 0</dev/null 1>&2', "sh", program, *FLAGS.split(), *arguments],
                env={**os.environ, **extra, "HOME": self._folder.name},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        try:
            self.version = self.call("Browser.getVersion")["product"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """Asks it to end, then kills its whole group: the leader is not yet reaped, so the number is still its own."""
        with self._process, self._folder:
            try:
                with contextlib.suppress(ChildProcessError, TimeoutError):
                    self.call("Browser.close", patience=5)
                    self._wait(lambda: False, "end", patience=5)
            finally:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(PATIENCE)

    def open(self, path, width=1280, height=900, dark=False):
        """The page, when it is loaded. It is a phone if it is less than 600 wide."""
        target = self.call("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Page.setLifecycleEventsEnabled", enabled=True)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        went = page.call("Page.navigate", url=Path(path).absolute().as_uri())
        if "errorText" in went:
            raise FileNotFoundError(f"{path}: {went['errorText']}")
        self._wait(lambda: went["loaderId"] in page.loaded, f"load of {path}")
        return page

    def close_pages(self):
        while self._pages:
            self.call("Target.closeTarget", targetId=self._pages.popitem()[1].target)

    def call(self, method, session=None, patience=None, **params):
        """The answer to one command of the DevTools protocol."""
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        with contextlib.suppress(BrokenPipeError):  # to read tells more
            self._process.stdin.write(json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda: self._answers.pop(number, None), f"answer to {method}", patience)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _wait(self, done, what, patience=None):
        """Takes what Chromium says until `done` has a result."""
        patience = patience or PATIENCE
        deadline, pipe = time.monotonic() + patience, self._process.stdout.fileno()
        while not (result := done()):
            left = deadline - time.monotonic()
            if left < 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError(f"Chromium: no {what} within {patience:g} s; its log: {self._last_words()}")
            if not (heard := os.read(pipe, 1 << 20)):
                raise ChildProcessError(f"Chromium ended: no {what}; its log: {self._last_words()}")
            *messages, self._rest = (self._rest + heard).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                elif page := self._pages.get(message.get("sessionId")):
                    page.hear(message["method"], message["params"])
        return result

    def _last_words(self):
        return self._log.read_text(errors="replace")[-1000:]


class Page:
    """One page. `messages` and `requests` are complete up to all that has been started when they are asked for."""

    def __init__(self, browser, session, target):
        self._browser, self._session, self.target = browser, session, target
        self.loaded, self._pending, self._messages, self._requests = set(), {}, [], []

    @property
    def messages(self):
        """Console errors and warnings, uncaught exceptions and failed requests. Empty when all is well."""
        self._settle()
        return list(self._messages)

    @property
    def requests(self):
        """Every URL that was asked for, that of the page first."""
        self._settle()
        return list(self._requests)

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def evaluate(self, script):
        """The value of an expression, by JSON. A promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(thrown(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def click(self, selector):
        """A press and a release of the mouse at the centre of the first element that matches."""
        at = self.evaluate(CENTRE % json.dumps(selector))
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def screenshot(self, path, full=True):
        """A PNG of the whole page, or of what is seen of it: one pixel for each of CSS."""
        params = {}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            params = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **params)["data"]))

    def hear(self, event, params):
        match event:
            case "Page.lifecycleEvent" if params["name"] == "load":
                self.loaded.add(params["loaderId"])
            case "Network.requestWillBeSent":
                self._requests.append(params["request"]["url"])
                self._pending[params["requestId"]] = params["request"]["url"]
            case "Network.webSocketCreated":
                self._requests.append(params["url"])
            case "Network.loadingFinished":
                self._pending.pop(params["requestId"], None)
            case "Network.loadingFailed":
                url = self._pending.pop(params["requestId"], "a request")
                self._messages.append(f"{url}: {params['errorText'] or params.get('blockedReason')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                words = (str(part.get("value", part.get("description", part["type"]))) for part in params["args"])
                self._messages.append(f"console.{params['type']}: {' '.join(words)}")
            case "Runtime.exceptionThrown":
                self._messages.append(thrown(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                if params["entry"]["source"] != "network":  # those are heard above
                    self._messages.append(params["entry"]["text"])
            case "Inspector.targetCrashed":
                self._messages.append("the page crashed")

    def _settle(self):
        for _ in range(2):  # what a finished request starts, too
            self.evaluate("new Promise(done => setTimeout(done))")
            self._browser._wait(lambda: not self._pending, "end of all requests")


def thrown(details):
    what = details.get("exception", {})
    return what.get("description") or f"{details['text']} {what.get('value', '')}"
