// Browsers start no workers for pages on the file system. There, run the search in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow, script = inside.document.createElement("script");
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise(resolve => { script.onload = resolve; });
      script.src = url;
      inside.document.body.append(script);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
