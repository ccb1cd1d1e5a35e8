// Histograms with clickable bars, and packs drawn to scale.

function bars(name, bins, label, { pick = null, noun = "row", size = "" } = {}) {
  const most = Math.max(1, ...bins.map((bin) => bin.rows));
  const total = bins.reduce((sum, bin) => sum + bin.rows, 0);
  return el("div", { class: `bars ${size}`, role: "group", "aria-label": name }, ...bins.map((bin) => {
    const text = `${label(bin)}: ${plural(bin.rows, noun)} (${percent(bin.rows, total, 1)})`;
    const show = () => showTip(bar, el("span", { text }));
    const bar = el(pick ? "button" : "span", {
      type: pick && "button", role: pick ? null : "img", class: "column", "aria-label": text,
      onclick: () => pick && bin.rows && pick(bin), onmouseover: show, onmouseout: hideTip, onfocus: show, onblur: hideTip,
    }, el("i"));
    if (!bin.rows) bar.tabIndex = -1;
    bar.firstChild.style.height = bin.rows ? `${Math.max(1.5, (100 * bin.rows) / most)}%` : "0";
    return bar;
  }));
}

function axis(labels) {
  return el("div", { class: "axis", "aria-hidden": "true" }, ...labels.map((text) => el("span", { text })));
}

const PERCENTS = ["0%", "25%", "50%", "75%", "100%"];
const inPercent = (bin) => [Math.round(100 * bin.from), Math.round(100 * bin.to)];
const shareLabel = (what) => (bin) => `${inPercent(bin).join(" to ")}% ${what}`;

function lengthChart(bins, pick) {
  const last = bins.length - 1;
  const label = (bin) => `${count(bin.from)} to ${count(bin.to)} tokens`;
  const steps = [0, 0.25, 0.5, 0.75].map((part) => Math.round(part * last));
  return el("figure", { id: "chart-length" },
    el("figcaption", {}, el("strong", { text: "Length" }), " tokens per row"),
    bars("Rows by length", bins, label, { pick: (bin) => pick(bin.from, bin.to) }),
    axis(bins.length ? [...steps.map((n) => count(bins[n].from)), count(bins[last].to)] : []));
}

function shareChart(bins, pick) {
  return el("figure", { id: "chart-share" },
    el("figcaption", {}, el("strong", { text: "Trained share" }), " trained tokens / tokens, per row"),
    bars("Rows by trained share", bins, shareLabel("trained"), { pick: (bin) => pick(...inPercent(bin)) }),
    axis(PERCENTS));
}

function packRows(preview, open) {
  const box = el("div", { class: "packs" });
  preview.drawn.forEach((pieces, number) => {
    const filled = pieces.reduce((sum, piece) => sum + piece[1], 0);
    const label = `Pack ${number + 1}: ${plural(pieces.length, "row")}, ${count(filled)} of ${count(preview.length)} tokens, ${percent(filled, preview.length, 1)} full`;
    const strip = el("div", { class: "pack", role: "img", "aria-label": label });
    pieces.forEach(([row, tokens], n) => {
      const part = el("span", {
        class: n % 2 ? "piece odd" : "piece", "data-row": row,
        onclick: () => open(row),
        onmouseover: () => showTip(part, el("span", { text: `row ${count(row)}, ${plural(tokens, "token")}` })), onmouseout: hideTip,
      });
      part.style.width = `${(100 * tokens) / preview.length}%`;
      strip.append(part);
    });
    box.append(el("div", { class: "pack-line" }, el("span", { class: "muted", text: String(number + 1) }), strip, el("span", { class: "fill", text: percent(filled, preview.length, 1) })));
  });
  return box;
}
