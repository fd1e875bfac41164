// The page of `dominotree trace`: one answer, and plain decoding beside it where that was recorded too.

import { element } from "./dom.js";
import { Markdown } from "./markdown.js";
import { Panel } from "./panel.js";
import { Race } from "./race.js";
import { Run } from "./run.js";

const data = JSON.parse(document.getElementById("trace").textContent);
const run = new Run(data.method, data.rounds);

document.getElementById("about").textContent = data.about;
document.getElementById("prompt").textContent = data.prompt;
new Markdown(document.getElementById("answer")).update(data.text);
const panel = new Panel(document.getElementById("panel"));
panel.follow(run);
panel.show(Math.min(1, run.length - 1));
if (data.plain) {
  const section = element("section", { id: "race" }, element("h2", {}, "Against plain decoding"));
  document.querySelector("main").append(section);
  new Race(section).show(new Run("ar", data.plain), run, { play: false });
}
