/* The page: built once from the data, refreshed when a live run sends more. */
const page = { data: null, view: new View(), at: -1, follow: true, playing: null };

function heading(data) {
  const { facts } = data, model = facts.model || {};
  const what = [model.name, facts.schedule, facts.num_ranks + " ranks", facts.num_stages + " stages", facts.num_microbatches + " microbatches"].filter(Boolean).join(" · ");
  return h("header", null, h("h1", null, data.title), h("span.subtitle", null, what), h("span.spacer"),
    h("span.badge" + (data.state === "running" ? ".running" : ""), { id: "state" }, data.state),
    h("button", { id: "theme", title: "light or dark", onclick: () => setTheme(isDark() ? "light" : "dark") }, "◐"));
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  page.view.redraw();
  if (page.data) drawLegend();
}

function timelineSection() {
  const { data, view } = page;
  const slider = h("input", { type: "range", id: "step", min: 0, "aria-label": "recorded step", oninput: () => { page.follow = false; showStep(Number(slider.value)); } });
  const rows = h("button", { id: "rows", "aria-pressed": "false", onclick: () => { view.byStage = !view.byStage; rows.setAttribute("aria-pressed", String(view.byStage)); view.redraw(); } }, "by stage");
  const play = h("button", { id: "play", title: "replay the recorded steps", onclick: togglePlay }, "▶ replay");
  page.measured = new Timeline(view, data, "measured timeline");
  page.simulated = new Timeline(view, data, "simulated timeline");
  return h("section", { id: "timeline" }, h("h2", null, "Timeline"),
    h("div.tools", null, h("label", null, "step ", slider), h("span", { id: "which" }), play, rows, h("button", { id: "reset", onclick: () => view.reset() }, "whole step"), h("span.faint", null, "wheel zooms, drag moves, double click shows the whole step")),
    h("h3", { id: "measured-title" }, "measured"), page.measured.element, h("h3", { id: "simulated-title" }, "simulated, with the measured medians as costs"), page.simulated.element, h("div.legend", { id: "kinds" }));
}

function drawLegend() {
  const box = document.getElementById("kinds");
  if (box) box.replaceChildren(...legend(page.data, new Set((page.data.rows || []).flat().map((action) => action[0]))));
}

function showStep(index) {
  const { data } = page, steps = data.steps;
  page.at = Math.max(0, Math.min(index, steps.length - 1));
  const drawn = steps[page.at], slider = document.getElementById("step");
  slider.max = Math.max(0, steps.length - 1);
  slider.value = page.at;
  document.getElementById("which").textContent = drawn ? `step ${drawn.step} of iteration ${drawn.iteration}, ${ticks(drawn.span)}` : "no step is recorded yet";
  if (drawn) page.measured.set(drawn.rows || data.rows, drawn);
  if (data.simulated) page.simulated.set(data.simulated.rows, data.simulated);
  document.getElementById("simulated-title").hidden = !data.simulated;
  page.view.setFull(Math.max(drawn ? drawn.span : 0, data.simulated ? data.simulated.span : 0));
  document.getElementById("bubbles").replaceChildren(h("h2", null, "Where the time went"), bubbleTable(data, drawn));
}

function togglePlay() {
  const button = document.getElementById("play");
  if (page.playing) { clearInterval(page.playing); page.playing = null; button.textContent = "▶ replay"; return; }
  button.textContent = "❚❚ stop";
  page.follow = false;
  let index = page.at >= page.data.steps.length - 1 ? 0 : page.at;
  showStep(index);
  page.playing = setInterval(() => { index += 1; if (index >= page.data.steps.length) togglePlay(); else showStep(index); }, 600);
}

function figures(data) {
  const verified = data.verified;
  const good = verified && !verified.length;
  const text = !verified ? "" : good ? "The executed actions form a program that verifies." : "The executed actions do not verify: " + verified.join("; ");
  return [h("section.notes", { id: "notes", hidden: !data.notes.length }, data.notes.map((note) => h("p", null, note))), text ? h("p." + (good ? "faint" : "bad"), { id: "verified" }, text) : null].filter(Boolean);
}

function build(data) {
  page.data = data;
  const main = h("main");
  main.append(heading(data), h("div", { id: "tiles" }), timelineSection(), typeof whatIf === "function" && page.live ? whatIf(data) : "", h("section", { id: "bubbles" }), h("div.pair", { id: "curves" }), h("section", { id: "memory" }), h("section", { id: "stages" }, h("h2", null, "Stages"), stageTable(data)));
  if (data.plan) main.append(h("section", { id: "plan" }, h("details", null, h("summary", null, "Plan"), planPanel(data.plan))));
  main.append(h("section", { id: "config" }, h("details", null, h("summary", null, "Config"), h("pre", null, data.config || "no config.yaml"))));
  if (data.summary) main.append(h("section", { id: "summary" }, h("details", null, h("summary", null, "Summary"), table(["", ""], Object.entries(data.summary).map(([name, value]) => [name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : String(value)]), { wide: [1] }))));
  main.append(h("div", { id: "remarks" }));
  const about = [data.facts.vpipe && "vpipe " + data.facts.vpipe, data.facts.torch && "torch " + data.facts.torch, data.facts.started && "started " + data.facts.started, Array.isArray(data.facts.command) && data.facts.command.join(" ")].filter(Boolean);
  main.append(h("p.faint", { id: "about" }, about.join(" · ")));
  document.getElementById("app").replaceChildren(main);
  refresh();
}

function refresh() {
  const { data } = page;
  document.getElementById("tiles").replaceWith(tiles(data));
  document.getElementById("curves").replaceChildren(...lossCharts(data));
  document.getElementById("memory").replaceChildren(h("h2", null, "Memory"), memoryTable(data));
  document.getElementById("remarks").replaceChildren(...figures(data));
  showStep(page.follow || page.at < 0 ? data.steps.length - 1 : page.at);
  drawLegend();
}

/* Live: the server sends the whole once, then what changed; the browser reconnects by itself. */
const MOST_STEPS = 40;

function remember(data) {
  for (const step of data.steps) step.rows = step.rows || data.rows;
  if (!page.data) return data;
  const known = new Map(page.data.steps.map((step) => [step.step, step]));
  for (const step of data.steps) known.set(step.step, step);
  data.steps = [...known.values()].sort((a, b) => a.step - b.step).slice(-MOST_STEPS);
  return data;
}

function connect() {
  const token = new URLSearchParams(location.search).get("token") || "";
  const source = new EventSource("events?token=" + encodeURIComponent(token));
  const state = (text, kind) => { const badge = document.getElementById("state"); if (badge) { badge.textContent = text; badge.className = "badge " + kind; } };
  const settled = () => state(page.data.state, page.data.state === "running" ? "running" : "");
  const take = (data) => {
    if (page.data && data.facts && page.data.facts.started !== data.facts.started) page.data = null;
    const first = !page.data;
    if (first) build(remember(data));
    else { Object.assign(page.data, remember(data)); refresh(); }
    document.title = page.data.title;
    settled();
  };
  source.addEventListener("whole", (event) => take(JSON.parse(event.data)));
  source.addEventListener("change", (event) => { if (page.data) take(JSON.parse(event.data)); });
  source.addEventListener("problem", (event) => { if (!page.data) document.getElementById("app").replaceChildren(h("main", null, h("p", null, JSON.parse(event.data)))); });
  source.onerror = () => state("connection lost, trying again", "lost");
}

function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  let before = null;
  addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; document.documentElement.dataset.theme = "light"; for (const each of document.querySelectorAll("details")) each.open = true; page.view.drawings.forEach((each) => each.draw()); });
  addEventListener("afterprint", () => setTheme(before || "light"));
  const embedded = document.getElementById("data");
  if (embedded) build(JSON.parse(embedded.textContent));
  else { page.live = true; document.getElementById("app").replaceChildren(h("main", null, h("p.faint", null, "reading the run …"))); connect(); }
}
