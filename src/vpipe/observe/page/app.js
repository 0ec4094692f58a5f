/* The page: built once from the data, refreshed when a live run sends more. */
const page = { data: null, view: new View(), at: -1, follow: true, playing: null };
const query = new URLSearchParams(location.search);

function heading(data) {
  const { facts } = data, model = facts.model || {};
  const what = [model.name, facts.schedule, facts.num_ranks && facts.num_ranks + " ranks", facts.num_stages && facts.num_stages + " stages", facts.num_microbatches && facts.num_microbatches + " microbatches"].filter(Boolean).join(" · ");
  return h("header", null, h("h1", null, data.title), h("span.subtitle", null, what), h("span.spacer"),
    query.has("run") ? h("a", { href: "?token=" + encodeURIComponent(query.get("token") || "") }, "all runs") : null,
    h("span.badge." + data.state.kind, { id: "state", title: data.state.sentence || "" }, data.state.kind),
    h("button", { id: "theme", title: "light or dark", "aria-label": "light or dark", onclick: () => setTheme(isDark() ? "light" : "dark") }, "◐"));
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  page.view.redraw();
  if (page.data) drawLegend();
}

function timelineSection() {
  const { data, view } = page;
  const slider = h("input", { type: "range", id: "step", min: 0, "aria-label": "recorded step", oninput: () => { page.follow = Number(slider.value) >= data.steps.length - 1; showStep(Number(slider.value)); } });
  const rows = h("button", { id: "rows", "aria-pressed": "false", onclick: () => { view.byStage = !view.byStage; rows.setAttribute("aria-pressed", String(view.byStage)); view.redraw(); } }, "by stage");
  const play = h("button", { id: "play", title: "replay the recorded steps", onclick: togglePlay }, "▶ replay");
  page.measured = new Timeline(view, data, "measured timeline");
  page.simulated = new Timeline(view, data, "simulated timeline");
  return h("section", { id: "timeline" }, h("h2", null, "Timeline"),
    h("div.tools", null, h("label", null, "step ", slider), h("span", { id: "which" }), play, rows, h("button", { id: "reset", onclick: () => view.reset() }, "whole step"), h("span.faint.hint", null, "wheel zooms, drag moves, double click shows the whole step")),
    h("h3", { id: "measured-title" }, "measured"), page.measured.element, h("h3", { id: "simulated-title" }, "simulated, with the measured medians as costs"), page.simulated.element, h("div.legend", { id: "kinds" }));
}

function drawLegend() {
  const box = document.getElementById("kinds"), drawn = page.data.steps[page.at];
  const rows = drawn ? page.data.programs[drawn.program].rows : [];
  if (box) box.replaceChildren(...legend(page.data, new Set(rows.flat().map((action) => action[0]))));
}

function showStep(index) {
  const { data } = page, steps = data.steps;
  page.at = Math.max(0, Math.min(index, steps.length - 1));
  const drawn = steps[page.at], slider = document.getElementById("step"), program = drawn ? data.programs[drawn.program] : null;
  slider.max = Math.max(0, steps.length - 1);
  slider.value = page.at;
  tellAge();
  page.measured.marks = page.simulated.marks = (data.trend || {}).stragglers || {};
  if (drawn) page.measured.set(program.rows, drawn);
  const simulated = program && program.simulated;
  if (simulated) page.simulated.set(simulated.rows, simulated);
  document.getElementById("simulated-title").hidden = !simulated;
  page.simulated.element.hidden = !simulated;
  page.view.setFull(Math.max(drawn ? drawn.span : 0, simulated ? simulated.span : 0));
  document.getElementById("bubbles").replaceChildren(h("h2", null, "Where the time went"), bubbleTable(data, drawn), timesPanel(data));
}

/* Which step is shown, and how old it is while the run goes on. */
function tellAge() {
  const { data } = page, drawn = data.steps[page.at], box = document.getElementById("which");
  if (!box) return;
  const old = page.live && data.state.kind === "running" && drawn && drawn.time ? ", " + fixed(Math.max(0, Date.now() / 1000 - drawn.time), 0) + " s ago" : "";
  box.textContent = drawn ? `iteration ${drawn.iteration}, ${ticks(drawn.took)}${old}` : "no step is recorded yet";
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
  const verified = data.verified, good = verified && !verified.length;
  const text = !verified ? "" : good ? "The executed actions form a program that verifies." : "The executed actions do not verify: " + verified.join("; ");
  return [h("section.notes", { id: "notes", hidden: !data.notes.length }, data.notes.map((note) => h("p", null, note))), text ? h("p." + (good ? "faint" : "bad"), { id: "verified" }, text) : null].filter(Boolean);
}

function folded(id, title, inside) { return h("section", { id }, h("details", null, h("summary", null, title), inside)); }

function build(data) {
  page.data = data;
  const main = h("main", null, heading(data), h("div", { id: "story" }), h("div", { id: "verdict" }));
  const started = Boolean(data.facts.num_ranks);
  if (started) main.append(h("div", { id: "tiles" }), timelineSection(), h("section", { id: "bubbles" }), typeof whatIf === "function" && page.live ? whatIf(data) : "", h("div.charts", { id: "curves" }), h("section", { id: "memory" }), h("section", { id: "stages" }));
  if (data.plan) main.append(folded("plan", "Plan", planPanel(data.plan)));
  main.append(folded("config", "Config", h("pre", null, data.config || "no config.yaml")));
  if (data.summary) main.append(folded("summary", "Summary", table(["", ""], Object.entries(data.summary).map(([name, value]) => [name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : String(value)]), { wide: [1] })));
  main.append(h("div", { id: "remarks" }));
  const about = [data.facts.vpipe && "vpipe " + data.facts.vpipe, data.facts.torch && "torch " + data.facts.torch, data.facts.started && "started " + data.facts.started, Array.isArray(data.facts.command) && data.facts.command.join(" ")].filter(Boolean);
  main.append(h("p.faint", { id: "about" }, about.join(" · ")));
  document.getElementById("app").replaceChildren(main);
  refresh();
}

function refresh() {
  const { data } = page;
  document.getElementById("story").replaceWith(statePanel(data));
  for (const text of document.querySelectorAll("#story pre")) text.scrollTop = text.scrollHeight; // its end says what it was
  document.getElementById("remarks").replaceChildren(...figures(data));
  if (!data.facts.num_ranks) return;
  document.getElementById("verdict").replaceWith(verdictPanel(data));
  document.getElementById("tiles").replaceWith(tiles(data));
  document.getElementById("curves").replaceChildren(...lossCharts(data), ...trendCharts(data));
  document.getElementById("memory").replaceChildren(h("h2", null, "Memory"), memoryTable(data));
  document.getElementById("stages").replaceChildren(h("h2", null, "Stages"), stageTable(data), ...layoutTable(data), ...recoveryTable(data));
  showStep(page.follow || page.at < 0 ? data.steps.length - 1 : page.at);
  drawLegend();
  if (page.measuredMore) page.measuredMore();
}

/* Live: the server sends the whole once, then what changed; the browser reconnects by itself. */
const MOST_STEPS = 40;

function remember(data) {
  if (!page.data) return data;
  const known = new Map(page.data.steps.map((step) => [step.step, step]));
  for (const step of data.steps) known.set(step.step, step);
  data.steps = [...known.values()].sort((a, b) => a.step - b.step).slice(-MOST_STEPS);
  data.programs = { ...page.data.programs, ...data.programs };
  return data;
}

function connect() {
  const source = new EventSource("events?" + query);
  const badge = (text, kind) => { const box = document.getElementById("state"); if (box) { box.textContent = text; box.className = "badge " + kind; } };
  const take = (data) => {
    const fresh = data.facts && page.data && (page.data.facts.started !== data.facts.started || page.data.facts.num_ranks !== data.facts.num_ranks);
    if (fresh) { page.data = null; page.view = new View(); }
    if (!page.data) build(remember(data));
    else { Object.assign(page.data, remember(data)); refresh(); }
    document.title = page.data.title;
    badge(page.data.state.kind, page.data.state.kind);
  };
  source.addEventListener("whole", (event) => take(JSON.parse(event.data)));
  source.addEventListener("change", (event) => { if (page.data) take(JSON.parse(event.data)); });
  source.addEventListener("problem", (event) => { if (!page.data) document.getElementById("app").replaceChildren(h("main", null, h("p", null, JSON.parse(event.data)))); });
  source.onerror = () => badge("connection lost, trying again", "lost");
  setInterval(() => { if (page.data && page.data.facts.num_ranks) tellAge(); }, 500);
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
