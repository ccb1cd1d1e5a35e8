// Recorded rollouts: drift classes and findings of rows; rewards and lengths over steps.

const CLASSES = ["equal", "retokenized", "text", "structure"];
const UNCHECKED = "unchecked";
const MEANINGS = {
  equal: "the ids equal one encoding of the expected text", retokenized: "different ids, the same text",
  text: "the text differs from the expected text", structure: "a part is missing, duplicated or marked wrongly",
  unchecked: "nothing to compare with",
};

const driftBadge = (name) => el("span", { class: `drift drift-${name || UNCHECKED}`, title: MEANINGS[name || UNCHECKED], text: name || UNCHECKED });

// A number of a row, coloured by its position between the minimum and maximum of the store.
function numberChip(name, value) {
  const range = data.overview.numbers.find((one) => one.name === name);
  const chip = el("span", { class: "chip", text: `${harmless(name)} ${value}` });
  const span = range ? range.high - range.low : 0;
  if (span > 0) heat(chip, (value - range.low) / span, { low: 0, high: 1 });
  return chip;
}

function verdictOf(row) {
  if (!data.overview.drift) return null;
  const reward = row.numbers.reward;
  return el("span", { class: "verdict-line" }, driftBadge(row.drift), typeof reward === "number" ? numberChip("reward", reward) : null);
}

// A class for each token with a finding; the most severe of several.
function findingMarks(row) {
  const marks = [];
  for (const one of [...row.findings].reverse()) if (one.token !== null) marks[one.token] = `finding finding-${one.class || UNCHECKED}`;
  return marks;
}

const FINDINGS_AT_ONCE = 6;

function findingsOf(row) {
  if (!row.findings.length) return null;
  const list = el("ol", { class: "findings", "aria-label": "Findings" });
  const more = (first, last) => list.append(...row.findings.slice(first, last).map((one) => el("li", {}, findingItem(row, one))));
  more(0, FINDINGS_AT_ONCE);
  const left = row.findings.length - FINDINGS_AT_ONCE;
  if (left > 0) {
    const item = el("li", {}, el("button", { type: "button", class: "link", text: `${plural(left, "more finding")}`, onclick: () => { item.remove(); more(FINDINGS_AT_ONCE); } }));
    list.append(item);
  }
  return list;
}

function findingItem(row, one) {
  const there = one.token !== null && one.token < row.length;
  const place = [one.turn === null ? null : `turn ${count(one.turn)}`, one.token === null ? null : `token ${count(one.token)}`].filter(Boolean).join(", ");
  const text = (name, value) => [el("dt", { text: name }), el("dd", {}, value === "" ? el("span", { class: "muted", text: "nothing" }) : el("code", { text: shownLine(value) }))];
  return el("button", { type: "button", class: `finding-item finding-${one.class || UNCHECKED}`, disabled: !there, onclick: (event) => showToken(event.currentTarget, one.token) },
    el("span", { class: "finding-head" }, driftBadge(one.class), el("strong", { text: harmless(one.kind.replace(/_/g, " ")) }),
      el("span", { class: "muted", text: place + (one.token !== null && !there ? " (cut off)" : "") })),
    one.detail ? el("span", { class: "finding-detail", text: harmless(one.detail) }) : null,
    el("dl", {}, ...text("expected", one.expected), ...text("found", one.found)));
}

const shownLine = (text) => harmless(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥");

// Go to a token of the button's row: unfold its turn and draw it up to the token.
function showToken(from, at) {
  const side = from.closest(".side");
  const boxes = [side, byId("prompt"), side ? null : byId("row-body")].filter(Boolean);
  for (const section of boxes.flatMap((box) => [...box.querySelectorAll("section.turn")])) {
    if (at < Number(section.dataset.start) || at >= Number(section.dataset.end)) continue;
    toggle(section, true);
    for (const image of section.querySelectorAll('.image[aria-expanded="false"]')) {
      if (Number(image.dataset.start) <= at && at < Number(image.dataset.end)) image.click();
    }
    for (let more; !section.querySelector(`.tok[data-at="${at}"]`) && (more = section.querySelector(".more"));) more.click();
    const span = section.querySelector(`.tok[data-at="${at}"]`);
    document.querySelectorAll("#view .tok.shown").forEach((one) => one.classList.remove("shown"));
    span.classList.add("shown");
    focusToken(span);
    hideTip(); // it would cover the text around the token
    span.scrollIntoView({ block: "center" });
    return;
  }
}

// Over steps

const stepName = (bin) => (bin.from === bin.to ? `step ${count(bin.from)}` : `steps ${count(bin.from)} to ${count(bin.to)}`);
const shortNumber = (value) => (Math.abs(value) >= 1000 ? count(Math.round(value)) : String(Number(value.toPrecision(3))));

function stepAxis(bins) {
  const last = bins.length - 1;
  const places = [...new Set([0, 0.25, 0.5, 0.75, 1].map((part) => Math.round(part * last)))];
  return axis(places.map((n) => shortNumber(n === last ? bins[n].to : bins[n].from)));
}

function quantileChart(name, title, about, bins, pick) {
  const known = bins.filter((bin) => bin[name]);
  const low = Math.min(...known.map((bin) => bin[name][0]), name === "length" ? 0 : Infinity);
  const high = Math.max(...known.map((bin) => bin[name][4]));
  const height = (value) => (high > low ? (100 * (value - low)) / (high - low) : 50);
  const columns = bins.map((bin) => {
    const column = el("button", { type: "button", class: "column quantiles", onclick: () => bin[name] && pick(bin) });
    if (!bin[name]) return column;
    const [p10, p25, p50, p75, p90] = bin[name];
    const text = `${stepName(bin)}: median ${shortNumber(p50)}, middle half ${shortNumber(p25)} to ${shortNumber(p75)}, 80% ${shortNumber(p10)} to ${shortNumber(p90)}; ${plural(bin.rows, "row")}`;
    const part = (kind, from, to) => {
      const made = el("i", { class: kind });
      made.style.bottom = `${height(from)}%`;
      if (to !== undefined) made.style.height = `${Math.max(1, height(to) - height(from))}%`;
      return made;
    };
    column.setAttribute("aria-label", text);
    column.append(part("most", p10, p90), part("half", p25, p75), part("median", p50));
    const show = () => showTip(column, el("span", { text }));
    for (const event of ["mouseover", "focus"]) column.addEventListener(event, show);
    for (const event of ["mouseout", "blur"]) column.addEventListener(event, hideTip);
    return column;
  });
  return el("figure", { id: `steps-${name}` },
    el("figcaption", {}, el("strong", { text: title }), ` ${about}`),
    el("div", { class: "scaled" }, el("div", { class: "scale-labels", "aria-hidden": "true" }, el("span", { text: shortNumber(high) }), el("span", { text: shortNumber(low) })),
      el("div", {}, el("div", { class: "bars", role: "group", "aria-label": `${title} over steps` }, ...columns), stepAxis(bins))));
}

function driftChart(bins, filter) {
  const shown = [UNCHECKED, ...CLASSES].filter((name) => bins.some((bin) => bin.drift[name]));
  const columns = bins.map((bin) => el("div", { class: "column stacked" }, ...[...shown].reverse().filter((name) => bin.drift[name]).map((name) => {
    const text = `${stepName(bin)}, ${name}: ${plural(bin.drift[name], "row")} (${percent(bin.drift[name], bin.rows, 1)})`;
    const show = () => showTip(part, el("span", { text }));
    const part = el("button", { type: "button", class: `part drift-${name}`, "aria-label": text, onmouseover: show, onmouseout: hideTip, onfocus: show, onblur: hideTip, onclick: () => filter({ ...stepFilter(bin), drift: name }) });
    part.style.height = percent(bin.drift[name], bin.rows, 3);
    return part;
  })));
  return el("figure", { id: "steps-drift" },
    el("figcaption", {}, el("strong", { text: "Drift" }), " share of rows by class"),
    el("div", { class: "scaled" }, el("div", { class: "scale-labels", "aria-hidden": "true" }, el("span", { text: "100%" }), el("span", { text: "0%" })),
      el("div", {}, el("div", { class: "bars", role: "group", "aria-label": "Drift classes over steps" }, ...columns), stepAxis(bins))),
    el("p", { class: "keys" }, ...shown.map((name) => el("span", {}, el("i", { class: `part drift-${name}` }), name))));
}

const stepFilter = (bin) => ({ number: "step", numberLeast: bin.from, numberMost: bin.to });

// The part of the overview about rollouts; empty without rollouts.
function rolloutParts(overview, filter) {
  const { steps, drift } = overview;
  const parts = [];
  if (steps) {
    const pick = (bin) => filter(stepFilter(bin));
    const together = steps.bins.length < steps.steps ? ` There are ${count(steps.steps)} steps; adjacent ones share a bar.` : "";
    parts.push(el("h3", { text: "Over steps" }), el("div", { class: "charts", id: "steps" },
      steps.numbers.includes("reward") ? quantileChart("reward", "Reward", "median, middle half and 80% of rows", steps.bins, pick) : null,
      quantileChart("length", "Length", "tokens per row: median, middle half and 80% of rows", steps.bins, pick),
      drift ? driftChart(steps.bins, filter) : null),
    el("p", { class: "hint", text: `Click a bar to see the rows of its step.${together}` }));
  }
  if (drift) {
    parts.push(el("h3", { text: "Per drift class" }), table(["class", "rows", "of all rows"], [...CLASSES].reverse().concat(UNCHECKED).filter((name) => name !== UNCHECKED || drift[name]).map((name) => [
      el("button", { type: "button", class: "link", onclick: () => filter({ drift: name }) }, driftBadge(name)), count(drift[name]), percent(drift[name], overview.totals.rows, 1)])));
  }
  return parts;
}
