// Search runs in a worker, which browsers refuse to pages that are opened as files. There it runs in
// a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.onload = () => this.begin(new URL(url, document.baseURI).href);
      this.frame.srcdoc = "<!doctype html>";
      document.documentElement.append(this.frame);
    }

    begin(url) {
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => {
        const copy = structuredClone(data);
        setTimeout(() => this.onmessage?.({ data: copy }));
      };
      const script = inner.document.createElement("script");
      script.onload = () => {
        this.inner = inner;
        this.waiting.forEach((data) => this.postMessage(data));
      };
      script.onerror = (event) => this.onerror?.(event);
      script.src = url;
      inner.document.head.append(script);
    }

    postMessage(data) {
      const copy = structuredClone(data);
      if (this.inner) {
        this.inner.dispatchEvent(new MessageEvent("message", { data: copy }));
      } else {
        this.waiting.push(copy);
      }
    }

    terminate() {
      this.frame.remove();
    }
  };
}
