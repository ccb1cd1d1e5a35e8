// Two stores side by side: changes of text, ids and mask.

function marksOf(both, side) {
  const own = side === "ours" ? both.ours : both.theirs;
  const other = side === "ours" ? both.theirs : both.ours;
  const marks = new Array(own.ids.length);
  for (const [kind, a0, a1, b0, b1] of both.steps) {
    const [from, to, there] = side === "ours" ? [a0, a1, b0] : [b0, b1, a0];
    for (let n = from; n < to; n++) {
      if (kind !== "equal") marks[n] = "changed";
      else if (own.mask[n] !== other.mask[there + n - from]) marks[n] = "mask-changed";
    }
  }
  return marks;
}

// One column of rows that are shown side by side: title, numbers, tokens.
function sideOf(title, row, facts, shown) {
  return el("div", { class: "side" },
    el("h3", { text: title }),
    el("p", { class: "facts" }, ...[`row ${count(row.row)}`, plural(row.length, "token"), `${count(row.trained)} trained`, ...facts].map((text) => el("span", { text }))),
    turnsOf(row, shown));
}

function comparedRow(both) {
  if (!both.theirs) return el("div", {}, el("p", { class: "note", text: both.note }), turnsOf(both.ours));
  const { changed } = both;
  const verdict = (name, yes, more) => el("span", { class: yes ? "verdict differs" : "verdict", "data-what": name, text: `${name} ${yes ? `changed${more || ""}` : "same"}` });
  const column = (title, row, side) => sideOf(title, row, [], { marks: marksOf(both, side), side });
  return el("div", { class: "comparison" },
    el("p", { class: "verdicts" }, verdict("text", changed.text), verdict("ids", changed.ids), verdict("mask", changed.mask, changed.mask_tokens ? ` on ${plural(changed.mask_tokens, "token")}` : "")),
    both.note ? el("p", { class: "note", text: both.note }) : null,
    both.aligned ? null : el("p", { class: "note", text: "The rows differ too much to align single tokens." }),
    el("p", { class: "hint" }, "Outlined: different token. Dashed: same token, different mask."),
    el("div", { class: "sides" }, column("This store", both.ours, "ours"), column("Other store", both.theirs, "theirs")));
}

function comparePanel(data, filter) {
  const { compare, overview } = data;
  const survey = el("div", { id: "survey" }, el("button", { type: "button", text: "Compare all rows", onclick: () => run() }));
  const run = async () => {
    survey.replaceChildren(el("p", { text: "Comparing…" }));
    try {
      const found = await data.survey();
      const part = found.surveyed < found.of ? ` (the first ${count(found.surveyed)} of ${count(found.of)} rows)` : "";
      survey.replaceChildren(
        el("p", { text: `Row by row${part}:` }),
        table(["what", "rows"], [
          ["same ids and mask", count(found.same)], ["ids changed", count(found.ids)],
          ["only the mask changed", count(found.mask_only)], ["not in the other store", count(found.missing)],
          ...(found.only_theirs === null ? [] : [["only in the other store", count(found.only_theirs)]])]),
        el("button", { type: "button", text: "Show changed rows", onclick: () => filter({ changed: true }) }));
    } catch (error) {
      survey.replaceChildren(el("p", { class: "note", text: error.message }));
    }
  };
  const show = (value) => el("code", { text: harmless(JSON.stringify(value)) });
  return [
    el("h2", { text: "Comparison" }),
    el("p", {}, "This store ", el("code", { text: harmless(overview.path) }), el("br"), "Other store ", el("code", { text: harmless(compare.path) })),
    el("h3", { text: "Differences between the recipes" }),
    compare.differs.length
      ? el("div", { class: "scroll" }, el("table", { id: "differs" }, el("thead", {}, el("tr", {}, ...["field", "this store", "other store"].map((text) => el("th", { scope: "col", text })))),
        el("tbody", {}, ...compare.differs.map((one) => el("tr", {}, el("th", { scope: "row", text: one.field }), el("td", {}, show(one.ours)), el("td", {}, show(one.theirs)))))))
      : el("p", { text: "None: both stores were built with the same recipe." }),
    el("h3", { text: "Rows" }), survey];
}
