/* The playground: sliders, the timeline, and single actions that can be moved, with the verifier's words beside. The
   address holds everything, so a link is the whole state. */
const SLIDERS = [["ranks", "p ranks", 1, 16, 1, 4], ["microbatches", "m microbatches", 1, 48, 1, 8], ["stages_per_rank", "v stages each", 1, 4, 1, 2], ["forward", "F forward", 0, 4, 0.1, 1], ["input_grad", "I input gradient", 0, 4, 0.1, 1], ["weight_grad", "W weight gradient", 0, 4, 0.1, 1], ["latency", "latency", 0, 4, 0.1, 0], ["memory", "memory of a rank, microbatches (0: any)", 0, 32, 0.5, 0]];
const play = { rows: null, past: [], chosen: null, found: null };

async function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const address = new URLSearchParams(location.search), token = address.get("token") || "";
  const ask = (where, parts) => fetch(where + "?" + new URLSearchParams({ token, ...parts })).then((reply) => reply.json());
  const first = await ask("start", {}), view = new View();
  const drawing = new Timeline(view, { kinds: first.kinds, colours: first.colours, textures: first.textures, unitless: true }, "timeline");
  const select = h("select", { name: "schedule", "aria-label": "schedule" }, first.schedules.map((entry) => h("option", { value: entry.name, selected: entry.name === (address.get("schedule") || "1f1b") }, entry.name)));
  const about = h("p.faint"), figures = h("div.tiles", { id: "figures" }), words = h("div", { id: "words", role: "status" }), text = h("textarea", { id: "rows", rows: 6, spellcheck: "false", "aria-label": "the program, one line per rank" });
  const slider = ([name, label, min, max, step, value]) => {
    const shown = h("output"), input = h("input", { type: "range", name, min, max, step, value: address.get(name) || value, "aria-label": label });
    const tell = () => { shown.textContent = input.value; };
    input.addEventListener("input", tell);
    tell();
    return h("label.slide", null, h("span", null, label, " ", shown), input);
  };
  const form = h("form.form.slides", { id: "form" }, h("label", null, "schedule", select), SLIDERS.map(slider));
  const tools = { earlier: -1, later: 1 }, button = (name, act) => h("button", { id: name, type: "button", onclick: act }, name);
  const move = (by) => () => edit((row, at) => { const to = at + by; if (to < 0 || to >= row.length) return false; [row[at], row[to]] = [row[to], row[at]]; return true; });
  const remove = () => edit((row, at) => { row.splice(at, 1); return true; });
  const chosen = h("span.faint", { id: "chosen" }, "click an action to move it");
  const save = (name, type, content) => { const link = h("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name }); link.click(); URL.revokeObjectURL(link.href); };
  const exports = [button("csv", () => save("schedule.csv", "text/csv", play.found.csv)), button("svg", () => { if (play.found.svg) save("schedule.svg", "image/svg+xml", play.found.svg); }), button("link", () => navigator.clipboard && navigator.clipboard.writeText(shared()))];
  const shared = () => { const url = new URL(location.href); url.searchParams.delete("token"); return url.search; };

  function edit(change) {
    if (!play.chosen || !play.found) return;
    const rows = play.found.csv.trimEnd().split("\n").map((line) => line.split(","));
    const at = rows[play.chosen.rank].indexOf(play.chosen.name);
    if (at < 0 || !change(rows[play.chosen.rank], at)) return;
    take(rows.map((row) => row.join(",")).join("\n") + "\n");
  }
  function take(rows) { play.past.push(play.rows); play.rows = rows; soon(); }
  function tell(found) {
    const sum = found.summary, list = (values, format = String) => [...new Set(values.map(format))].length === 1 ? format(values[0]) : values.map(format).join(" ");
    figures.replaceChildren(...(sum ? [tile("makespan", short(sum.makespan), "ideal " + short(sum.ideal)), tile("bubble", percent(sum.bubble), "ranks busy " + list(sum.utilisation, (value) => percent(value, 0)), MEANINGS.bubble), tile("peak activations", short(Math.max(...sum.peak_activations)), "by rank " + list(sum.peak_activations)), tile("weight versions", String(Math.max(...sum.weight_versions)), "by stage " + list(sum.weight_versions)), tile("staleness", String(Math.max(...sum.staleness)), "in updates, by stage " + list(sum.staleness))] : []));
    const lines = [...found.violations, ...(found.more ? [`and ${found.more} more`] : [])];
    words.replaceChildren(found.stuck ? h("p.bad", null, found.stuck) : "", ...(lines.length ? lines.map((line) => h("p.bad", null, line)) : [h("p.good", null, "The program verifies: every action has what it needs, nothing is lost, no rank waits for ever.")]), found.partly && found.edited ? h("p.faint", null, "Updates of an asynchronous schedule have rules of their own, which this page does not check: vpipe verify schedule.csv does.") : "");
  }
  async function refresh() {
    const parts = Object.fromEntries(new FormData(form));
    if (play.rows) parts.rows = play.rows;
    history.replaceState(null, "", "?" + new URLSearchParams({ token, ...parts }));
    const number = (play.number = (play.number || 0) + 1), found = await ask("play", parts).catch(() => ({ error: "the server does not answer" }));
    if (number !== play.number) return;
    if (found.error) { words.replaceChildren(h("p.bad", null, found.error)); return; }
    play.found = found;
    if (document.activeElement !== text) text.value = found.csv;
    tell(found);
    drawing.element.classList.toggle("stale", !found.simulated);
    if (found.simulated) { drawing.set(found.simulated.rows, found.simulated); view.setFull(found.simulated.span); legendBox.replaceChildren(...legend(first, new Set(found.simulated.rows.flat().map((action) => action[0])))); }
    undo.disabled = !play.past.length;
  }
  const soon = () => { clearTimeout(play.timer); play.timer = setTimeout(refresh, 60); };
  const changed = () => { const entry = first.schedules.find((each) => each.name === select.value) || {}; about.textContent = [entry.summary, entry.needs && "needs " + entry.needs].filter(Boolean).join("; "); form.elements.stages_per_rank.closest("label").hidden = !entry.any_stages_per_rank; };
  const shape = new Set(["schedule", "ranks", "microbatches", "stages_per_rank"]);
  form.addEventListener("input", (event) => { if (shape.has(event.target.name)) { play.rows = null; play.past = []; } changed(); soon(); });
  text.addEventListener("input", () => take(text.value));
  drawing.canvas.addEventListener("click", (event) => { const item = drawing.hit(event); if (item && !item.waiting) { play.chosen = { rank: item.rank, name: item.stage + item.kind + (item.microbatch < 0 ? "" : item.microbatch) }; chosen.textContent = play.chosen.name + " on rank " + item.rank; } });
  const undo = button("undo", () => { if (play.past.length) { play.rows = play.past.pop(); soon(); } });
  const again = button("reset", () => { play.rows = null; play.past = []; text.blur(); soon(); }), legendBox = h("div.legend");
  const dark = h("button", { id: "theme", type: "button", "aria-label": "light or dark", onclick: () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; view.redraw(); } }, "◐");
  document.getElementById("app").replaceChildren(h("main", null, h("header", null, h("h1", null, "Playground"), h("span.subtitle", null, "schedules, before anything runs"), h("span.spacer"), h("span.faint", null, "export"), ...exports, dark),
    h("section", null, form, about), figures,
    h("section", { id: "timeline" }, h("div.tools", null, chosen, ...Object.entries(tools).map(([name, by]) => button(name, move(by))), button("remove", remove), undo, again), drawing.element, legendBox),
    h("div.pair", null, h("section", null, h("h2", null, "What the verifier says"), words), h("section", null, h("h2", null, "The program"), text, h("p.faint", null, "one line per rank, one action per cell: stage, kind, microbatch; messages are added by themselves")))));
  play.rows = address.get("rows");
  changed();
  refresh();
}
