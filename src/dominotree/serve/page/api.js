// Talking to the server. Addresses are relative, so that the page also works behind a path of a proxy.

const CUT_OFF = "The connection ended before the answer did.";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function call(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `The server answered with status ${reply.status}.`, reply.status);
}

/** What the server can do: `{model, method, budget, max_budget, methods}`. */
export async function capabilities(key) {
  const found = await (await call("methods", key)).json();
  const models = await (await call("v1/models", key)).json();
  return { ...found, model: models.data[0].id };
}

/**
 * The answer to a request, piece by piece: `{text, rounds, finish}`. Stops reading, and with it the server's
 * work, when `signal` says so.
 */
export async function* answer(body, key, signal) {
  const reply = await call("v1/chat/completions", key, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, return_trace: true }),
    signal,
  });
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    for (const choice of chunk.choices) {
      yield {
        text: choice.delta.content ?? "",
        rounds: choice.trace ?? [],
        finish: choice.finish_reason,
      };
    }
  }
  throw new ApiError(CUT_OFF);
}

/** The data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ApiError(CUT_OFF);
      });
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) yield part.replace(/^data: /, "");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
