// Requests to the server: JSON, and completions as they stream.

const KEY = "longstride-key";

export class ApiError extends Error {}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

let asked = null; // While the dialog is open, for all requests that wait for the key.

// Asks for the key of a server that wants one. Resolves when it was given.
function askForKey() {
  asked ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const form = dialog.querySelector("form");
    dialog.querySelector("[role=alert]").hidden = !sessionStorage.getItem(KEY);
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, new FormData(form).get("key").trim());
      form.reset();
      asked = null;
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asked;
}

async function send(path, options) {
  for (;;) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: headers(options.headers) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    let message = `The server answers ${response.status}.`;
    try {
      message = (await response.json()).error.message;
    } catch {
      // No JSON: the status says what there is to say.
    }
    throw new ApiError(message);
  }
}

export async function getJson(path) {
  return (await send(path, { method: "GET" })).json();
}

export async function postJson(path, body, signal) {
  const type = { "Content-Type": "application/json" };
  return (await send(path, { method: "POST", headers: type, body: JSON.stringify(body), signal })).json();
}

// Yields { index, bytes, bits } of each choice of each chunk; bits only with `logprobs: 0` in the body, which takes longer.
export async function* complete(body, signal) {
  const type = { "Content-Type": "application/json" };
  const whole = JSON.stringify({ ...body, stream: true });
  const response = await send("/v1/completions", { method: "POST", headers: type, body: whole, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    for (const one of chunk.choices) {
      const logs = one.logprobs?.token_logprobs ?? [];
      const bits = logs.map((log) => (log === null ? null : -log / Math.LN2));
      yield { index: one.index, bytes: one.byte_ids ?? [], bits };
    }
  }
}

// Yields the data of the events of a stream.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
