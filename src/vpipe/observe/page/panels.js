/* The parts of the page that are figures and tables. Each takes the data and returns an element. */
function tile(name, value, note) {
  return h("div.tile", null, h("div.name", null, name), h("div.value", null, value), h("div.note", null, note || " "));
}

function tiles(data) {
  const { train, evaluation, count } = data.metrics, prediction = data.prediction || {};
  const last = (values) => values.filter(isNumber).at(-1);
  const rate = (data.summary || {}).throughput_tokens_per_second;
  const memory = Math.max(0, ...data.memory.ranks.map((rank) => rank.peak || rank.rss || rank.allocated || 0));
  const tested = last(evaluation.loss);
  const total = data.facts.iterations, done = last(train.iteration) || 0;
  return h("div.tiles", { id: "tiles" },
    tile("loss", fixed(last(train.loss), 4), isNumber(tested) ? "evaluation " + fixed(tested, 4) : "training"),
    tile("tokens per second", short(isNumber(rate) ? rate : median(train.tokens_per_second.slice(2))), seconds(median(train.seconds)) + " per iteration"),
    tile("one step, measured", seconds(prediction.measured_seconds), isNumber(prediction.error) ? "simulated " + (prediction.error >= 0 ? "+" : "−") + percent(Math.abs(prediction.error)) : "not simulated"),
    tile("bubble, measured", percent(prediction.measured_bubble), isNumber(prediction.simulated_bubble) ? "simulated " + percent(prediction.simulated_bubble) : ""),
    tile("memory, largest rank", memory ? bytes(memory) : DASH, data.facts.model && data.facts.model.parameters ? short(data.facts.model.parameters) + " parameters" : ""),
    tile("iterations", done.toLocaleString("en"), total ? percent(done / total, 0) + " of " + total.toLocaleString("en") : data.state === "finished" ? "finished" : count + " lines"));
}

function bubbleTable(data, drawn) {
  if (!drawn) return h("p.faint", null, "no step is recorded yet");
  const { window: whole, busy, parts } = drawn.bubbles, causes = data.causes;
  const share = (value) => percent(value / whole);
  const bar = (worked, list) => h("div.bar", { role: "img", "aria-label": "share of the step" }, h("i", { title: "busy " + share(worked), style: { width: (100 * worked) / whole + "%", background: "var(--busy)" } }), list.map((value, index) => h("i", { title: causes[index][1] + " " + share(value), style: { width: (100 * value) / whole + "%", background: `var(--${causes[index][0]})` } })));
  const rows = busy.map((worked, rank) => ["rank " + rank, bar(worked, parts[rank]), share(worked), share(whole - worked), ...parts[rank].map(share)]);
  const mean = (pick) => busy.reduce((sum, _, rank) => sum + pick(rank), 0) / busy.length;
  const means = causes.map((_, index) => mean((rank) => parts[rank][index])), work = mean((rank) => busy[rank]);
  rows.push({ total: true, cells: ["all ranks", bar(work, means), share(work), share(whole - work), ...means.map(share)] });
  const swatch = (name, label) => h("span", null, h("i", { style: { background: `var(--${name})` } }), label);
  return h("div", null, table(["", "", "busy", "idle", ...causes.map((cause) => cause[1])], rows),
    h("div.legend", null, swatch("busy", "busy"), causes.map(([name, label]) => swatch(name, label))),
    h("p.faint", null, "The window is " + ticks(whole) + ": from the end of the step before to the last end of this one. The parts sum to the idle time."));
}

function memoryTable(data) {
  const { stages, ranks } = data.memory;
  const terms = [...new Set(stages.flatMap((row) => Object.keys(row.planned || {})))];
  const planned = (row, term) => (row.planned ? bytes(row.planned[term]) : DASH);
  const predicted = table(["stage", "rank", "weights", "versions", "kept versions", "microbatches held", ...terms.map((term) => "plan: " + term.replaceAll("_", " "))],
    stages.map((row) => [row.stage, row.ranks.join(" "), bytes(row.weights), row.versions, bytes(row.version_bytes), row.in_flight, ...terms.map((term) => planned(row, term))]));
  const titles = { rss: "process", in_step: "activations and gradients" };
  const keys = [...new Set(ranks.flatMap((row) => Object.keys(row)))];
  const most = (row) => Math.max(row.peak || 0, row.rss || 0, row.allocated || 0, row.weights || 0);
  const top = Math.max(1, ...ranks.map(most));
  const bar = (row) => h("div.bar", { role: "img", "aria-label": "weights and the rest" }, [["accent", row.weights || 0, "weights"], ["busy", Math.max(0, most(row) - (row.weights || 0)), "activations and the rest"]].map(([name, value, label]) => h("i", { title: label + " " + bytes(value), style: { width: (100 * value) / top + "%", background: `var(--${name})` } })));
  const cell = (row, name) => (name === "versions" && row[name] < 4096 ? String(row[name]) : bytes(row[name]));
  const measured = keys.length ? table(["rank", "weights, then the rest", ...keys.map((name) => titles[name] || name.replaceAll("_", " "))],
    ranks.map((row, rank) => [rank, bar(row), ...keys.map((name) => cell(row, name))]), { wide: [1] }) : h("p.faint", null, "nothing recorded");
  return h("div", null, h("h3", null, "predicted, per stage"), predicted, h("h3", null, "measured, the most of each rank"), measured);
}

function stageTable(data) {
  const rows = (data.facts.stages || []).map((row) => {
    const layers = row.layers || [];
    const names = layers.length > 6 ? [...layers.slice(0, 3), "… " + (layers.length - 5) + " more …", ...layers.slice(-2)] : layers;
    return [row.stage, names.join(", "), layers.length, short(row.parameters), bytes(row.weight_bytes)];
  });
  return table(["stage", "layers", "number", "parameters", "weights"], rows, { wide: [1] });
}

function planPanel(plan) {
  const simple = Object.entries(plan).filter(([, value]) => value === null || typeof value !== "object");
  return h("div", null, table(["", ""], simple.map(([name, value]) => [name.replaceAll("_", " "), String(value)]), { wide: [1] }), h("h3", null, "plan.json"), h("pre", null, JSON.stringify(plan, null, 1)));
}

function lossCharts(data) {
  const { train, evaluation } = data.metrics;
  const accent = "var(--accent)";
  const loss = [{ name: "loss", x: train.iteration, y: train.loss, tint: accent, faint: train.loss.length > 60 }];
  if (train.loss.length > 60) loss.push({ name: "smoothed", x: train.iteration, y: smooth(train.loss), tint: accent });
  if (evaluation.loss.length) loss.push({ name: "evaluation", x: evaluation.iteration, y: evaluation.loss, tint: "var(--imbalance)", dots: evaluation.loss.length < 40 });
  const rate = [{ name: "tokens per second", x: train.iteration, y: train.tokens_per_second, tint: "var(--good)" }];
  return [h("section", { id: "loss" }, h("h2", null, "Loss"), chart({ series: loss, format: (value) => Number(value.toPrecision(4)) + "" }), key(loss)),
    h("section", { id: "throughput" }, h("h2", null, "Throughput"), chart({ series: rate, format: short, fromZero: true }), key(rate))];
}
