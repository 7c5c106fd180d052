// Search in pages that are opened as files. Browsers start no worker from a file: address, so the worker's script runs in
// a hidden frame instead, which has its own global names. Pages that come from a server keep the browser's workers.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const waiting = [];
      let isReady = false;
      const deliver = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: reject });
          inside.document.body.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...sources) =>
        sources.reduce((done, source) => done.then(() => load(new URL(source, address).href)), Promise.resolve());
      this.postMessage = (data) => (isReady ? deliver(data) : waiting.push(data));
      this.terminate = () => frame.remove();
      load(address).then(() => {
        isReady = true;
        waiting.splice(0).forEach(deliver);
      });
    }
  };
}
