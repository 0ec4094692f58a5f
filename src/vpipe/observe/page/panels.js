/* The parts of the page that are figures and tables. Each takes the data and returns an element. */
const MEANINGS = {
  iteration: "One iteration as the training loop sees it: reading the batch and the step, without evaluation and checkpoints. The median of the iterations whose steps are recorded.",
  step: "From the first work to the last end of one step, over all ranks. The median of the recorded steps of one program, without the first.",
  window: "From the end of the step before to the end of this one, over all ranks: the step and what lies between two steps. Idle time is counted in it.",
  simulated: "The executed program, simulated with the measured medians of each stage and kind as costs. What it lacks against the measured step is what medians do not explain.",
  bubble: "The idle share over all ranks: 1 − (work of all ranks) / (ranks × time). Measured in the window of a step; simulated in the makespan.",
  tensors: "The most of any rank: weights in all their versions, optimizer states, and what a step makes, counted operation by operation. The interpreter and torch are not in it.",
};

function defined(text, meaning) {
  return meaning ? h("span.defined", { title: meaning, tabindex: 0 }, text) : text;
}

function tile(name, value, note, meaning) {
  return h("div.tile", null, h("div.name", null, defined(name, meaning)), h("div.value", null, value), h("div.note", { title: note || "" }, note || " "));
}

const iterationSeconds = (data) => { const known = (data.prediction || {}).iteration_seconds; return isNumber(known) ? known : median(data.metrics.train.seconds); };
const figure = (value) => (isNumber(value) && Math.abs(value) >= 1000 ? short(value) : fixed(value, 4));
const signed = (value) => (Math.abs(value) < 5e-4 ? "" : value > 0 ? "+" : "−") + percent(Math.abs(value));

function tiles(data) {
  const { train, evaluation } = data.metrics, prediction = data.prediction || {};
  const last = (values) => values.filter(isNumber).at(-1);
  const rate = (data.summary || {}).throughput_tokens_per_second;
  const held = (data.memory || { ranks: [] }).ranks, most = (name) => Math.max(0, ...held.map((rank) => rank[name] || 0));
  const tested = last(evaluation.loss), total = data.facts.iterations, done = last(train.iteration) || 0;
  const unit = data.facts.synchronous === false && prediction.units, read = last(evaluation.examples || []);
  const over = isNumber(read) ? ` over ${short(read)} examples, ${short(last(evaluation.targets))} targets` : "";
  return h("div.tiles", { id: "tiles" },
    tile("loss", figure(last(train.loss)), isNumber(tested) ? "evaluation " + figure(tested) + over : "training"),
    tile(data.metrics.unit + " per second", short(isNumber(rate) ? rate : median(train.tokens_per_second.slice(2))), seconds(iterationSeconds(data)) + " per iteration", MEANINGS.iteration),
    unit ? tile("one unit, measured", seconds(prediction.measured_seconds / unit), unit + " units in " + seconds(prediction.measured_seconds), MEANINGS.step)
      : tile("one step, measured", seconds(prediction.measured_seconds), isNumber(prediction.error) ? "simulated " + signed(prediction.error) : "not simulated", MEANINGS.step),
    tile("bubble, measured", percent(prediction.measured_bubble), isNumber(prediction.simulated_bubble) ? "simulated " + percent(prediction.simulated_bubble) : "", MEANINGS.bubble),
    tile("tensors, largest rank", most("tensors") ? bytes(most("tensors")) : DASH, most("peak") ? "allocator " + bytes(most("peak")) : most("rss") ? "process " + bytes(most("rss")) : "", MEANINGS.tensors),
    tile("iterations", done.toLocaleString("en"), total ? percent(done / total, 0) + " of " + total.toLocaleString("en") : ""));
}

/* Four times that look alike, side by side with what they mean. */
function timesPanel(data) {
  const prediction = data.prediction || {};
  const rows = [["iteration", iterationSeconds(data), "iteration"], ["step, measured", prediction.measured_seconds, "step"], ["window of a step", prediction.window_seconds, "window"], ["step, simulated", prediction.simulated_seconds, "simulated"]];
  return h("details", null, h("summary", null, "What the times mean"), table(["", "time", "what it is"], rows.map(([name, value, key]) => [name, seconds(value), MEANINGS[key]]), { wide: [2] }));
}

/* What a run came to, where it did not simply go on or finish. */
function statePanel(data) {
  const state = data.state;
  if (state.kind === "running" || state.kind === "finished") return h("div", { id: "story", hidden: true });
  const heading = { failed: "The run failed", killed: "The run was killed", lost: "The run was lost", stopped: "The run was stopped", interrupted: "The run was interrupted", starting: "The run is starting", unknown: "The state of the run is not known" }[state.kind] || state.kind;
  const where = isNumber(state.rank) ? " on rank " + state.rank : "";
  return h("section." + (state.bad ? "failed" : "notes"), { id: "story" }, h("h2", null, heading + where),
    state.sentence ? h("p.cause", null, state.sentence) : null, state.remedy ? h("p", null, state.remedy) : null,
    state.details ? h("details", { open: state.bad }, h("summary", null, "First cause"), h("pre", null, state.details)) : null,
    state.log.length ? h("details", { open: state.bad }, h("summary", null, "Last lines of the log"), h("pre", { id: "log" }, state.log.join("\n"))) : null);
}

function verdictPanel(data) {
  const found = data.verdict, slow = Object.entries((data.trend || {}).stragglers || {});
  if (!found && !slow.length) return h("div", { id: "verdict", hidden: true });
  return h("section", { id: "verdict" },
    found ? h("p.says", null, found.says) : null,
    found && found.remedy ? h("p", null, h("code", { title: "predicted " + fixed(found.remedy.gain, 2) + " times as fast, from this run's own measured costs" }, found.remedy.command)) : null,
    slow.map(([rank, why]) => h("p.straggler", null, "▲ Rank " + rank + " is a straggler: it " + why + ".")));
}

/* The medians of the recorded steps, which the verdict tells as well; last the step that is drawn, whose parts are exact. */
function bubbleTable(data, drawn) {
  if (!drawn) return h("p.faint", null, "no step is recorded yet");
  const { window: whole, busy, parts } = drawn.bubbles, causes = data.causes, { shares, steps } = data.prediction;
  const bar = ([worked, ...list]) => h("div.bar", { role: "img", "aria-label": "share of the step" }, h("i", { title: "busy " + percent(worked), style: { width: 100 * worked + "%", background: "var(--busy)" } }), list.map((value, index) => h("i." + causes[index][0], { title: causes[index][1] + " " + percent(value), style: { width: 100 * value + "%" } })));
  const cells = (name, row) => [name, bar(row), percent(row[0]), percent(1 - row[0]), ...row.slice(1).map((value) => percent(value))];
  const alone = [busy, ...causes.map((_, index) => parts.map((part) => part[index]))].map((column) => column.reduce((sum, value) => sum + value, 0) / whole / busy.length);
  const rows = shares.slice(0, -1).map((row, rank) => cells("rank " + rank, row));
  rows.push({ total: true, cells: cells("all ranks", shares.at(-1)) }, cells("iteration " + drawn.iteration, alone));
  const swatches = [h("span", null, h("i", { style: { background: "var(--busy)" } }), "busy"), ...causes.map(([name, label]) => h("span", null, h("i.cause." + name), label))];
  return h("div", null, table(["", "", "busy", "idle", ...causes.map((cause) => cause[1])], rows),
    h("div.legend", null, swatches),
    h("p.faint", null, "Medians of " + steps + " steps; last the one that is drawn, whose parts sum to its idle time: its ", defined("window", MEANINGS.window), " is " + ticks(whole) + ". Idle over all ranks is the ", defined("bubble", MEANINGS.bubble), "."));
}

function memoryTable(data) {
  const { stages, ranks } = data.memory;
  const terms = [...new Set(stages.flatMap((row) => Object.keys(row.predicted || {})))];
  const predicted = table(["stage", "rank", "weights", "versions", "kept versions", "microbatches held", ...terms.map((term) => term.replaceAll("_", " "))],
    stages.map((row) => [row.stage, row.ranks.join(" "), bytes(row.weights), row.versions, bytes(row.version_bytes), row.in_flight, ...terms.map((term) => (row.predicted ? bytes(row.predicted[term]) : DASH))]));
  const parts = [["accent", "weights", (row) => (row.weights || 0) * Math.max(1, row.versions || 1)], ["data", "optimizer", (row) => row.optimizer || 0], ["busy", "activations and gradients", (row) => row.in_step || 0]];
  const top = Math.max(1, ...ranks.map((row) => parts.reduce((sum, [, , size]) => sum + size(row), 0)));
  const bar = (row) => h("div.bar", { role: "img", "aria-label": "tensors of the rank" }, parts.map(([name, label, size]) => h("i", { title: label + " " + bytes(size(row)), style: { width: (100 * size(row)) / top + "%", background: `var(--${name})` } })));
  const measured = ranks.some((row) => Object.keys(row).length) ? table(["rank", "tensors", "weights", "versions", "optimizer", "activations and gradients", "all tensors", "process"],
    ranks.map((row, rank) => [rank, bar(row), bytes(row.weights), row.versions || DASH, bytes(row.optimizer), bytes(row.in_step), bytes(row.tensors), bytes(row.peak || row.rss || row.allocated)])) : h("p.faint", null, "nothing recorded");
  return h("div", null, h("h3", null, "measured, the most of each rank"), measured, h("div.legend", null, parts.map(([name, label]) => h("span", null, h("i", { style: { background: `var(--${name})` } }), label))),
    h("h3", null, "predicted for the executed order, per stage"), predicted);
}

function stageTable(data) {
  const hosts = data.facts.hosts || [], placed = data.facts.placement || [];
  const many = new Set(hosts).size > 1;
  const rows = (data.facts.stages || []).map((row) => {
    const layers = row.layers || [];
    const names = layers.length > 6 ? [...layers.slice(0, 3), "… " + (layers.length - 5) + " more …", ...layers.slice(-2)] : layers;
    const ranks = placed[row.stage] || [];
    return [row.stage, ranks.map((rank) => rank + (many ? " on " + hosts[rank] : "")).join(", "), names.join(", "), layers.length, short(row.parameters), bytes(row.weight_bytes)];
  });
  return table(["stage", "rank", "layers", "number", "parameters", "weights"], rows, { wide: [2] });
}

/* The layout over time: what moved or was decided, and why; the latest first. A bar's parts are stages, as long as they have layers. */
function layoutTable(data) {
  const lines = data.layouts || [];
  if (!lines.length) return [];
  const colours = ["accent", "data", "busy", "faint"];
  const bar = (line) => h("div.bar", { role: "img", "aria-label": "layers of the stages" }, (line.partition || []).map((count, stage) => {
    const ranks = (line.ranks || [])[stage] || [];
    const share = (100 * count) / line.partition.reduce((sum, each) => sum + each, 0);
    return h("i", { title: `stage ${stage}: ${count} layers` + (ranks.length ? " on rank " + ranks.join(", ") : ""), style: { width: share + "%", background: `var(--${colours[(ranks.length ? ranks[0] : stage) % colours.length]})` } });
  }));
  const rows = lines.map((line) => [line.iteration, line.action, (line.partition || []).join(" "), (line.ranks || []).map((ranks) => ranks.join(",")).join(" ") || DASH, bar(line), line.reason]).reverse();
  return [h("h3", null, "Layout over time"), table(["iteration", "decision", "layers", "on ranks", "stages", "reason"], rows, { wide: [5] }), h("p.faint", null, "One colour is one rank; a part is a stage, as long as it has layers.")];
}

/* Ranks that an elastic run lost, and what the time to its first new step went to; the latest first. */
function recoveryTable(data) {
  const lines = data.recoveries || [];
  if (!lines.length) return [];
  const colours = { agreed: "data", groups: "accent", state: "busy", replay: "faint" };
  const total = (line) => Object.values(line.seconds || {}).reduce((sum, part) => sum + part, 0);
  const top = Math.max(1e-9, ...lines.map(total));
  const bar = (line) => h("div.bar", { role: "img", "aria-label": "parts of the recovery" }, Object.entries(line.seconds || {}).map(([name, part]) => h("i", { title: name + " " + part.toFixed(2) + " s", style: { width: (100 * part) / top + "%", background: `var(--${colours[name] || "faint"})` } })));
  const rows = lines.map((line) => [line.iteration, (line.lost || []).join("; "), line.ranks, total(line).toFixed(2) + " s", bar(line)]).reverse();
  return [h("h3", null, "Losses of ranks" + (isNumber(lines.at(-1).losses) ? ": " + lines.at(-1).losses : "")), table(["went on from", "why", "ranks", "recovery", "parts"], rows, { wide: [1] }),
    h("div.legend", null, Object.entries(colours).map(([name, colour]) => h("span", null, h("i", { style: { background: `var(--${colour})` } }), name)))];
}

function planPanel(plan) {
  const simple = Object.entries(plan).filter(([, value]) => value === null || typeof value !== "object");
  return h("div", null, table(["", ""], simple.map(([name, value]) => [name.replaceAll("_", " "), String(value)]), { wide: [1] }), h("h3", null, "plan.json"), h("pre", null, JSON.stringify(plan, null, 1)));
}
