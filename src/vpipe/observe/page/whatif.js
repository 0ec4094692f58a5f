/* What if: another schedule, other counts and costs, simulated by the server while you type. */
function whatIf(data) {
  const view = new View();
  const drawing = new Timeline(view, { kinds: data.kinds, colours: data.colours, unitless: true }, "what-if timeline");
  const error = h("div.error", { id: "whatif-error", role: "alert" }), result = h("p.faint", { id: "whatif-result" }), about = h("p.faint");
  const select = h("select", { name: "schedule", "aria-label": "schedule" });
  const field = (name, label, value, step) => h("label", null, label, h("input", { type: "number", name, value, min: step === 1 ? 1 : 0, step: step === 1 ? 1 : "any" }));
  const form = h("form.form", { id: "whatif-form" }, h("label", null, "schedule", select), field("ranks", "p ranks", data.facts.num_ranks || 4, 1), field("microbatches", "m microbatches", data.facts.num_microbatches || 8, 1), field("stages_per_rank", "v stages each", 2, 1), field("forward", "F forward", 1), field("input_grad", "I input grad", 1), field("weight_grad", "W weight grad", 1), field("latency", "latency", 0));
  const token = new URLSearchParams(location.search).get("token") || "";
  let entries = [], timer = null, asked = 0;
  const ask = async () => {
    const query = new URLSearchParams(new FormData(form));
    query.set("token", token);
    const number = (asked += 1);
    try {
      const reply = await fetch("whatif?" + query);
      const found = await reply.json();
      if (number !== asked) return;
      error.textContent = found.error || "";
      if (found.error) return;
      drawing.set(found.simulated.rows, found.simulated);
      view.setFull(found.simulated.span);
      const sum = found.summary;
      result.textContent = `${found.title}: makespan ${sum.makespan}, bubble ${percent(sum.bubble)}, peak activations ${sum.peak_activations.join(" ")}, weight versions ${sum.weight_versions.join(" ")}, staleness ${sum.staleness.join(" ")}`;
    } catch {
      error.textContent = "the server does not answer";
    }
  };
  const soon = () => { clearTimeout(timer); timer = setTimeout(ask, 120); };
  const chosen = () => {
    const entry = entries.find((each) => each.name === select.value) || {};
    about.textContent = [entry.summary, entry.needs && "needs " + entry.needs].filter(Boolean).join("; ");
    form.elements.stages_per_rank.disabled = !entry.any_stages_per_rank;
  };
  form.addEventListener("input", () => { chosen(); soon(); });
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  fetch("schedules?token=" + encodeURIComponent(token)).then((reply) => reply.json()).then((found) => {
    entries = found;
    select.append(...found.map((entry) => h("option", { value: entry.name, selected: entry.name === data.facts.schedule }, entry.name)));
    chosen();
    ask();
  }).catch(() => { error.textContent = "the server does not answer"; });
  return h("section.live-only", { id: "whatif" }, h("h2", null, "What if"), form, about, drawing.element, result, error);
}
