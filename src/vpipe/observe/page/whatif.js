/* What if: another schedule, other counts and costs, simulated by the server while you type, and again when the run has
   measured more. */
page.askAgain = 5000;

function whatIf(data) {
  const view = new View();
  const shown = { kinds: data.kinds, colours: data.colours, textures: data.textures, unitless: false };
  const drawing = new Timeline(view, shown, "what-if timeline");
  const error = h("div.error", { id: "whatif-error", role: "alert" }), result = h("p.faint", { id: "whatif-result" }), about = h("p.faint");
  const select = h("select", { name: "schedule", "aria-label": "schedule" });
  const source = h("select", { name: "costs", "aria-label": "costs" }, h("option", { value: "measured" }, "this run's"), h("option", { value: "own" }, "my own"));
  const field = (name, label, value, step) => h("label", null, label, h("input", { type: "number", name, value, min: step === 1 ? 1 : 0, step: step === 1 ? 1 : "any" }));
  const form = h("form.form", { id: "whatif-form" }, h("label", null, "schedule", select), field("ranks", "p ranks", data.facts.num_ranks || 4, 1), field("microbatches", "m microbatches", data.facts.num_microbatches || 8, 1), field("stages_per_rank", "v stages each", 2, 1), h("label", null, "costs", source), field("forward", "F forward", 1), field("input_grad", "I input grad", 1), field("weight_grad", "W weight grad", 1), field("latency", "latency", 0));
  const own = ["forward", "input_grad", "weight_grad", "latency"], address = new URLSearchParams(location.search);
  let entries = [], timer = null, asked = 0, begun = 0;
  const ask = async () => {
    const question = new URLSearchParams([...address, ...new FormData(form)]), number = (asked += 1);
    begun = Date.now();
    try {
      const found = await (await fetch("whatif?" + question)).json();
      if (number !== asked) return;
      error.textContent = found.error || "";
      if (found.error) return;
      shown.unitless = found.unitless;
      drawing.set(found.simulated.rows, found.simulated);
      view.setFull(found.simulated.span);
      const sum = found.summary, time = found.unitless ? sum.makespan : seconds(sum.makespan);
      const gain = isNumber(found.gain) ? ` (${fixed(found.gain, 2)}× as fast as this run, simulated)` : "";
      result.textContent = `${found.title}: makespan ${time}${gain}, bubble ${percent(sum.bubble)}, peak activations ${sum.peak_activations.map((value) => Number(value.toPrecision(3))).join(" ")}, weight versions ${sum.weight_versions.join(" ")}, staleness ${sum.staleness.join(" ")}`;
    } catch {
      error.textContent = "the server does not answer";
    }
  };
  page.measuredMore = () => { if (entries.length && source.value === "measured" && Date.now() - begun > page.askAgain) ask(); };
  const soon = () => { clearTimeout(timer); timer = setTimeout(ask, 120); };
  const chosen = () => {
    const entry = entries.find((each) => each.name === select.value) || {};
    about.textContent = [entry.summary, entry.needs && "needs " + entry.needs].filter(Boolean).join("; ");
    form.elements.stages_per_rank.disabled = !entry.any_stages_per_rank;
    for (const name of own) form.elements[name].closest("label").hidden = source.value === "measured";
  };
  form.addEventListener("input", () => { chosen(); soon(); });
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  fetch("schedules?" + address).then((reply) => reply.json()).then((found) => {
    entries = found;
    select.append(...found.map((entry) => h("option", { value: entry.name, selected: entry.name === data.facts.schedule }, entry.name)));
    chosen();
    ask();
  }).catch(() => { error.textContent = "the server does not answer"; });
  return h("section.live-only", { id: "whatif" }, h("h2", null, "What if"), form, about, drawing.element, result, error);
}
