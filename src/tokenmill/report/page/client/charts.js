// Histograms whose bars can be pressed, and packs drawn to scale.

function bars(name, histogram, label, pick) {
  const most = Math.max(1, ...histogram.counts);
  const total = histogram.counts.reduce((sum, one) => sum + one, 0);
  const box = el("div", { class: "bars", role: "group", "aria-label": name });
  histogram.counts.forEach((rows, n) => {
    const text = `${label(n)}: ${plural(rows, "row")} (${percent(rows, total, 1)})`;
    const bar = el("button", {
      type: "button", class: "column", "aria-label": text, disabled: !rows && !pick ? true : null,
      onclick: () => pick && rows && pick(n),
      onmouseover: () => showTip(bar, el("span", { text })), onmouseout: hideTip,
      onfocus: () => showTip(bar, el("span", { text })), onblur: hideTip,
    }, el("i"));
    if (!rows) bar.tabIndex = -1;
    bar.firstChild.style.height = rows ? `${Math.max(1.5, (100 * rows) / most)}%` : "0";
    box.append(bar);
  });
  return box;
}

function axis(labels) {
  return el("div", { class: "axis", "aria-hidden": "true" }, ...labels.map((text) => el("span", { text })));
}

function lengthChart(histogram, pick) {
  const { edges, counts } = histogram;
  const last = counts.length - 1;
  const label = (n) => `${count(edges[n])} to ${count(edges[n + 1] - 1)} tokens`;
  const steps = [0, 0.25, 0.5, 0.75].map((part) => count(edges[Math.round(part * last)]));
  return el("figure", { id: "chart-length" },
    el("figcaption", {}, el("strong", { text: "Length" }), " tokens of a row"),
    bars("Rows by length", histogram, label, (n) => pick(edges[n], edges[n + 1] - 1)),
    axis([...steps, count(edges[last + 1] - 1)]));
}

function shareChart(histogram, pick) {
  const label = (n) => `${5 * n} to ${5 * n + 5}% trained`;
  return el("figure", { id: "chart-share" },
    el("figcaption", {}, el("strong", { text: "Trained share" }), " trained tokens of a row over all its tokens"),
    bars("Rows by trained share", histogram, label, (n) => pick(5 * n, 5 * n + 5)),
    axis(["0%", "25%", "50%", "75%", "100%"]));
}

function packRows(preview, open) {
  const box = el("div", { class: "packs" });
  preview.drawn.forEach((pieces, number) => {
    const filled = pieces.reduce((sum, piece) => sum + piece[1], 0);
    const said = `Pack ${number + 1}: ${plural(pieces.length, "row")}, ${count(filled)} of ${count(preview.length)} tokens, ${percent(filled, preview.length, 1)} full`;
    const strip = el("div", { class: "pack", role: "img", "aria-label": said });
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
