/* The playground's answers without a server: what observe/playground.py says, from programs that the page carries. */
const MOST_WORDS = 12;

/* What can be wrong with a program of F, B, I, W and STEP, in the words of schedule/verify.py. The rules that several
   updates of a stage follow (asynchronous schedules) are the verifier's alone, and the page says so. */
function violations(rows, ranksOf, units, memory, stuck, peaks) {
  const found = [], place = new Map(), say = (rank, index, action, reason) => found.push({ rank, index, action, reason });
  rows.forEach((row, rank) => row.forEach((action, index) => {
    const { stage, kind, microbatch } = action, name = named(action);
    if (stage >= ranksOf.length) say(rank, index, name, `there is no stage ${stage}: the program has stages 0..${ranksOf.length - 1}`);
    else if (microbatch >= units) say(rank, index, name, `there is no microbatch ${microbatch}: the program has 0..${units - 1}`);
    else if (kind === "STEP" && !ranksOf[stage].includes(rank)) say(rank, index, name, `stage ${stage} lives on rank ${ranksOf[stage].join(" and ")}, not on rank ${rank}`);
    else if (kind !== "STEP" && homeOf(ranksOf, stage, microbatch) !== rank) say(rank, index, name, `${name} belongs on rank ${homeOf(ranksOf, stage, microbatch)}`);
  }));
  const strange = found.length > 0;
  rows.forEach((row, rank) => row.forEach((action, index) => {
    const name = named(action);
    if (action.kind !== "STEP" && place.has(name)) say(rank, index, name, `runs twice, first as action ${place.get(name)[1]}`);
    else place.set(name, [rank, index]);
  }));
  const has = (stage, kind, microbatch) => place.has(stage + kind + microbatch);
  ranksOf.forEach((_, stage) => {
    for (let microbatch = 0; microbatch < units; microbatch += 1) {
      const rank = homeOf(ranksOf, stage, microbatch), back = ["B", "I", "W"].filter((kind) => has(stage, kind, microbatch)), of = `of microbatch ${microbatch} at stage ${stage}`;
      if (!has(stage, "F", microbatch)) say(rank, -1, "", `the forward ${of} (${stage}F${microbatch}) is missing`);
      if (back.join("") !== "B" && back.join("") !== "IW") say(rank, -1, "", `the backward ${of} must be one B, or I and W; the program has ${back.map((kind) => stage + kind + microbatch).join(", ") || "nothing"}`);
    }
  });
  if (strange) return told(found);
  needsInOrder(rows, ranksOf, place, say);
  rows.forEach((row, rank) => {
    const gathered = new Map();
    row.forEach((action, index) => {
      if (WEIGHT_KINDS.includes(action.kind)) gathered.set(action.stage, named(action));
      else if (action.kind === "STEP" && !gathered.delete(action.stage) && ranksOf[action.stage].indexOf(rank) < units) say(rank, index, named(action), `stage ${action.stage} has no new gradient to apply`);
    });
    gathered.forEach((left, stage) => say(rank, -1, "", `no ${stage}STEP follows ${left}: its gradient is never applied`));
  });
  if (!found.length) for (const { rank, action } of stuck) say(rank, place.has(named(action)) ? place.get(named(action))[1] : -1, named(action), "deadlock: waits for ever for what another rank sends");
  if (!found.length && memory) peaks.forEach((peak, rank) => { if (peak > memory + 1e-9) say(rank, -1, "", `holds the activations of ${Number(peak.toPrecision(6))} microbatches, more than the bound of ${memory}`); });
  return told(found);
}

/* What an action needs of its own rank comes earlier in the row; what nobody runs is said. */
function needsInOrder(rows, ranksOf, place, say) {
  rows.forEach((row, rank) => row.forEach((action, index) => {
    const { stage, kind, microbatch } = action;
    const wanted = kind === "F" ? (stage ? [[stage - 1, ["F"]]] : []) : kind === "W" ? [[stage, ["I"]]] : INPUT_KINDS.includes(kind) ? [[stage, ["F"]], ...(stage + 1 < ranksOf.length ? [[stage + 1, INPUT_KINDS]] : [])] : [];
    for (const [other, kinds] of wanted) {
      const names = kinds.map((each) => other + each + microbatch), known = names.find((name) => place.has(name));
      if (homeOf(ranksOf, other, microbatch) !== rank) { if (known === undefined) say(rank, index, named(action), `has no counterpart: ${names.join(" or ")} is missing`); continue; }
      if (known === undefined) say(rank, index, named(action), `needs ${names.join(" or ")}, which no rank runs`);
      else if (place.get(known)[1] > index) say(rank, index, named(action), `needs ${known}, which comes later in the row`);
    }
  }));
}

function told(found) {
  found.sort((a, b) => a.rank - b.rank || a.index - b.index || (a.reason < b.reason ? -1 : 1));
  return [...new Set(found.map(({ rank, index, action, reason }) => `rank ${rank}${index >= 0 ? `, action ${index} (${action})` : action ? ", " + action : ""}: ${reason}`))];
}

/* The timeline as the page draws it: differences in ticks of 1e-7 units of time. */
function drawnRows(ran) {
  const origin = Math.min(...ran.flatMap((row) => (row.length ? [row[0].begin] : [])), Infinity), tick = (time) => Math.round((time - origin) * 1e7);
  let span = 0;
  const ranks = ran.map((row) => {
    let at = 0;
    return row.flatMap(({ free, begin, end }) => { const from = Math.max(at, tick(free)), ready = tick(begin), until = tick(end), times = [from - at, ready - from, until - ready]; at = until; span = Math.max(span, until); return times; });
  });
  return { rows: ran.map((row) => row.map(({ action }) => [action.kind, action.stage, action.microbatch])), ranks, span };
}

function vectorPicture({ rows, ranks, span }, look, title) {
  const wide = 960, left = 60, tall = 26, scale = (wide - left - 10) / Math.max(1, span), parts = [];
  const escaped = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
  decode(rows, ranks).forEach((row, rank) => {
    const top = 34 + rank * tall;
    parts.push(`<text x="4" y="${top + 15}">rank ${rank}</text>`);
    for (const item of row) {
      const x = left + item.ready * scale, width = (item.end - item.ready) * scale;
      if (width <= 0) continue;
      parts.push(`<rect x="${x.toFixed(2)}" y="${top}" width="${Math.max(0.5, width - 0.8).toFixed(2)}" height="${tall - 4}" fill="${look.colours[item.kind][0]}"/>`);
      if (width > 18) parts.push(`<text x="${(x + width / 2).toFixed(2)}" y="${top + 15}" text-anchor="middle">${item.kind}${item.microbatch}</text>`);
    }
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${44 + rows.length * tall}" font-family="sans-serif" font-size="11"><text x="4" y="18">${escaped(title)}</text>${parts.join("")}</svg>\n`;
}

class Offline {
  static async of(data) {
    const bytes = Uint8Array.from(atob(data.programs), (sign) => sign.charCodeAt(0));
    const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
    return new Offline(data, text.split("\n"));
  }
  constructor(data, programs) { Object.assign(this, { data, programs }); }
  ask(where, parts) { return where === "start" ? this.data : this.play(parts); }
  play(parts) {
    try { return this.answer(parts); } catch (error) { return { error: error.message }; }
  }
  answer(parts) {
    const entry = this.data.schedules.find((each) => each.name === parts.schedule), { ranks, microbatches, stages } = this.data.most;
    if (!entry) throw new Error(`there is no schedule '${parts.schedule}' in this page`);
    const p = Number(parts.ranks), m = Number(parts.microbatches), v = entry.any_stages_per_rank ? Number(parts.stages_per_rank) : entry.stages_per_rank;
    if (p > ranks || m > microbatches || v > stages) throw new Error(`this page has schedules of up to ${ranks} ranks, ${microbatches} microbatches and ${stages} stages each; 'vpipe playground' has the others`);
    const text = this.programs[entry.first + ((entry.any_stages_per_rank ? v - 1 : 0) * ranks + (p - 1)) * microbatches + m - 1];
    if (text.startsWith("!")) throw new Error(this.data.refusals[Number(text.slice(1))]);
    const ranksOf = placed(entry.placement, p, v), built = unpack(text, ranksOf), rows = parts.rows ? fromCsv(parts.rows) : built;
    if (rows.length !== p) throw new Error(`the edited program has ${rows.length} ranks, but ${entry.name} has ${p}`);
    const costs = Object.fromEntries(["forward", "input_grad", "weight_grad", "latency"].map((name) => [name, Number(parts[name])]));
    const units = Math.max(1, ...[...built, ...rows].flat().map((action) => action.microbatch + 1)), known = rows.every((row) => row.every((action) => action.stage < ranksOf.length));
    const times = known ? timed(rows, ranksOf, costs, entry.blocking) : null;
    const even = known && timed(rows, ranksOf, { forward: 1, input_grad: 1, weight_grad: 1, latency: 0 }, false);
    const lines = violations(rows, ranksOf, units, Number(parts.memory) || 0, times ? times.stuck : [], even ? even.ran.map((row) => memoryPeak(row, even.share)) : []);
    const title = `${entry.name}${parts.rows ? ", edited" : ""}: ${p} ranks, ${units} microbatches`;
    const found = { csv: toCsv(rows), edited: Boolean(parts.rows), violations: lines.slice(0, MOST_WORDS), more: Math.max(0, lines.length - MOST_WORDS), title, partly: entry.asynchronous };
    if (!times || times.stuck.length) return { ...found, stuck: times ? `the program deadlocks at ${times.stuck.slice(0, 4).map(({ action }) => named(action)).join(", ")}` : undefined };
    const simulated = drawnRows(times.ran);
    return { ...found, summary: summed(times, rows, ranksOf, entry.delayed), simulated, svg: vectorPicture(simulated, this.data, title) };
  }
}
