// The page: a conversation beside what the decoder did, and the race.

import { answer, ApiError, capabilities } from "./api.js";
import { element, figure, oncePerFrame } from "./dom.js";
import { Markdown } from "./markdown.js";
import { Panel } from "./panel.js";
import { Race } from "./race.js";
import { Run } from "./run.js";
import { anySeed, Settings } from "./settings.js";
import { drawTree } from "./tree.js";

const WARM_UP_TOKENS = 8;
const NEAR_END = 80;

/** A round to look at before there is one. */
const SKETCH = {
  round: 1,
  root: { id: 0, text: "The" },
  nodes: [
    { id: 1, text: " sky", parent: -1, prob: 0.72, score: -0.33 },
    { id: 2, text: " is", parent: 0, prob: 0.81, score: -0.54 },
    { id: 3, text: " blue", parent: 1, prob: 0.55, score: -1.14 },
    { id: 4, text: " clear", parent: 1, prob: 0.2, score: -2.15 },
    { id: 5, text: " sea", parent: -1, prob: 0.12, score: -2.12 },
    { id: 6, text: " is", parent: 4, prob: 0.7, score: -2.48 },
    { id: 7, text: " looks", parent: 0, prob: 0.09, score: -2.74 },
  ],
  path: [0, 1, 2],
  tokens: [
    { id: 1, text: " sky" },
    { id: 2, text: " is" },
    { id: 3, text: " blue" },
    { id: 8, text: " because" },
  ],
};

const byId = (id) => document.getElementById(id);
const [log, text, send, hint, status] = ["log", "text", "send", "hint", "status"].map(byId);
const welcome = byId("welcome");
const panel = new Panel(byId("panel"));
const race = new Race(byId("race"));
const settings = new Settings(byId("settings"), () => connect());
let conversation = []; // the messages that the model has seen and given
let conversations = 0; // so that an answer knows whether it still belongs to the one on the screen
let working = null; // the controller that stops what runs

// The server

let connection = 0;

/** Learns what the server can do; asks for a key where one is needed, and only when the page has just come up. */
async function connect({ first = false } = {}) {
  const mine = ++connection;
  try {
    const can = await capabilities(settings.key);
    if (mine !== connection) return;
    byId("model").textContent = can.model;
    settings.offer(can);
    adapt();
  } catch (error) {
    if (mine !== connection) return;
    byId("model").textContent = "";
    hint.textContent = error.status === 401 ? "The server asks for a key; the settings have a place for it." : error.message;
    if (error.status === 401 && first) settings.open("key");
  }
}

// What is chosen

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const racing = () => chosen("view") === "race";

function adapt() {
  document.body.dataset.view = chosen("view");
  const drafts = Boolean(settings.method) && settings.method !== "ar";
  for (const radio of document.querySelectorAll("#mode input")) radio.disabled = !drafts;
  if (settings.can && !drafts) document.querySelector("#mode input[value=plain]").checked = true;
  byId("mode").hidden = racing();
  send.textContent = working ? "Stop" : racing() ? "Race" : "Send";
  send.classList.toggle("stop", Boolean(working));
  send.disabled = !working && (!text.value.trim() || (racing() && !drafts));
  if (settings.can) hint.textContent = racing() && !drafts ? "There is no drafter to race with." : describeChoice();
}

function describeChoice() {
  const plain = !racing() && chosen("mode") === "plain";
  const { method, temperature } = settings.request(plain);
  const parts = [method];
  if (!plain && settings.budget) parts.push(`budget ${settings.budget}`);
  if (temperature > 0) parts.push(`temperature ${temperature}`);
  return parts.join(", ");
}

// A turn of the conversation

async function sendMessage(words) {
  const mine = conversations;
  welcome.hidden = true;
  const turn = [...conversation, { role: "user", content: words }];
  log.append(message("user", element("div", { class: "bubble" }, words)));
  const body = element("div", { class: "markdown" });
  const foot = element("footer", { class: "foot" });
  const shown = message("assistant", body, foot);
  shown.setAttribute("aria-busy", "true");
  log.append(shown);
  log.scrollTop = log.scrollHeight;
  const markdown = new Markdown(body);
  const request = settings.request(chosen("mode") === "plain");
  const run = new Run(request.method);
  panel.follow(run);
  let [said, reason] = ["", "stopped"];
  const draw = oncePerFrame(() => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    markdown.update(said);
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
  try {
    await work(async (signal) => {
      const asked = { ...request, messages: [...settings.opening, ...turn] };
      for await (const piece of answer(asked, settings.key, signal)) {
        said += piece.text;
        piece.rounds.forEach((entry) => run.add(entry));
        reason = piece.finish ?? reason;
        draw();
        if (panel.run === run) panel.update();
      }
    });
    if (said && mine === conversations) conversation = [...turn, { role: "assistant", content: said }];
  } catch (error) {
    reason = "failed";
    shown.append(complaint(error));
    if (!text.value) text.value = words;
  }
  markdown.update(said);
  if (panel.run === run) panel.draw(); // all of it is there when the answer is said to be complete
  shown.setAttribute("aria-busy", "false");
  foot.append(...footer(run, reason, request.temperature > 0 ? request.seed : undefined));
  log.scrollTop = log.scrollHeight;
  status.textContent = `${reason === "failed" ? "The answer failed" : "The answer is complete"}: ${foot.textContent}`;
}

function message(kind, ...parts) {
  const name = element("span", { class: "hidden" }, kind === "user" ? "You: " : "Answer: ");
  return element("article", { class: `message ${kind}` }, name, ...parts);
}

function footer(run, reason, seed) {
  const { tokens, tau, speed } = run.figures(run.length - 1);
  const parts = [run.method, `${tokens} tokens`, `${figure(speed, 1)} tokens/s`, `tau ${figure(tau, 2)}`];
  if (seed !== undefined) parts.push(`seed ${seed}`);
  if (reason !== "stop") parts.push({ length: "cut at the limit", stopped: "stopped", failed: "failed" }[reason] ?? reason);
  const nodes = [element("span", {}, parts.join(" · "))];
  if (run.length) {
    const show = () => {
      panel.follow(run);
      panel.show(0);
      byId("panel").scrollIntoView({ block: "nearest" });
    };
    nodes.push(element("button", { type: "button", class: "quiet", onclick: show }, "Show its rounds"));
  }
  return nodes;
}

function complaint(error) {
  if (error.status === 401) settings.open("key");
  const words = error instanceof ApiError ? error.message : `Something went wrong in this page: ${error.message}`;
  return element("p", { class: "complaint", role: "alert" }, words);
}

// The race

async function startRace(words) {
  byId("race").querySelector(".complaint")?.remove();
  const messages = [...settings.opening, { role: "user", content: words }];
  const seed = settings.request(true).seed ?? anySeed();
  try {
    await work(async (signal) => {
      const ask = (plain, changes = {}) =>
        answer({ ...settings.request(plain), seed, messages, ...changes }, settings.key, signal);
      for (const plain of [true, false]) {
        // The first passes of a kind are slow, whoever makes them.
        for await (const _ of ask(plain, { max_tokens: WARM_UP_TOKENS }));
      }
      await race.record((plain) => entriesOf(ask(plain)), settings.method);
    });
  } catch (error) {
    byId("race").append(complaint(error));
  }
}

async function* entriesOf(pieces) {
  for await (const { rounds } of pieces) yield* rounds;
}

/** Runs something that can be stopped; being stopped is no error. */
async function work(task) {
  working = new AbortController();
  adapt();
  try {
    await task(working.signal);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    working = null;
    adapt();
  }
}

// What the reader does

function submit() {
  if (working) return working.abort();
  const words = text.value.trim();
  if (!words || send.disabled) return undefined;
  if (racing()) return startRace(words);
  text.value = "";
  resize();
  return sendMessage(words);
}

function resize() {
  text.style.height = "auto";
  text.style.height = `${Math.min(text.scrollHeight, 180)}px`;
  adapt();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
text.addEventListener("input", resize);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!working) submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && working && !byId("settings").open) working.abort();
});
document.addEventListener("change", adapt);
byId("new").addEventListener("click", () => {
  working?.abort();
  conversation = [];
  conversations++;
  log.replaceChildren(welcome);
  welcome.hidden = false;
  panel.follow(null);
  text.focus();
});
byId("settings-open").addEventListener("click", () => settings.open());
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    text.value = example.textContent;
    resize();
    submit();
  });
}
byId("sketch").append(drawTree(SKETCH));
connect({ first: true });
adapt();
