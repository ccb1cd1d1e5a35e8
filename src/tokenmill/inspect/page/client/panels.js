// The other tabs: overview, rejected rows, packing, recipe and proofs.

function table(heads, rows) {
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map((head, n) => el("th", { scope: "col", class: n ? "number" : null, text: head })))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell, n) => {
      if (n === 0) return el("th", { scope: "row" }, cell);
      return el("td", { class: "number" }, cell);
    }))))));
}

const LISTED_SOURCES = 200;

function overviewPanel(data, filter) {
  const { overview } = data;
  const { totals } = overview;
  const marks = Object.keys(overview.percentiles);
  const sources = overview.sources.slice(0, LISTED_SOURCES);
  const more = overview.sources_total - sources.length;
  return [
    el("h2", { text: "Overview" }),
    el("div", { class: "charts" },
      lengthChart(overview.lengths, (least, most) => filter({ least, most })),
      shareChart(overview.shares, (shareLeast, shareMost) => filter({ shareLeast, shareMost }))),
    el("p", { class: "hint", text: "Click a bar to see its rows." }),
    ...rolloutParts(overview, filter),
    el("h3", { text: "Per row" }),
    table(["percentile", ...marks.map((name) => name.slice(1))], [
      ["tokens", ...marks.map((name) => count(overview.percentiles[name]))],
      ["trained", ...marks.map((name) => count(overview.trained_percentiles[name]))]]),
    el("h3", { text: "Per source" }),
    table(["source", "rows", "tokens", "trained", "share", "rejected"], sources.map((source, number) => [
      el("button", { type: "button", class: "link", text: harmless(source.path || "?"), onclick: () => filter({ source: number }) }),
      count(source.rows), count(source.tokens), count(source.trained_tokens),
      percent(source.trained_tokens, source.tokens, 1), count(source.rejected)])),
    more > 0 ? el("p", { class: "hint", text: `${count(more)} more sources are not listed.` }) : null,
    el("h3", { text: "Per role" }),
    table(["role", "turns", "tokens", "of all tokens", "trained", "trained share"], overview.roles.map((role) => [
      el("button", { type: "button", class: `link dot ${roleClass(role.role)}`, text: harmless(role.role), onclick: () => filter({ role: role.role }) }),
      count(role.turns), count(role.tokens), percent(role.tokens, totals.tokens, 1),
      role.trained_tokens === null ? "–" : count(role.trained_tokens),
      role.trained_tokens === null ? "–" : percent(role.trained_tokens, role.tokens, 1)])),
  ];
}

const REJECTED_AT_ONCE = 100;

const REASONS = {
  bad_json: "the line is not one JSON object",
  bad_shape: "not a conversation, text or pair of the format",
  bad_group: "the answers cannot be compared: one is empty, or they are equal",
  template_error: "the chat template raises an error for this row",
  template_drops_content: "the template does not print an assistant's text or tool call",
  mask_unproven: "the text of the assistant could not be located with certainty",
  trailing_user: "the conversation ends with a user turn",
  no_trained_tokens: "no token of the row is trained",
  overlong: "longer than max_length",
  limit: "the row exceeds a limit of size, nesting or rendering time",
};

function rejectedPanel(data, chosen) {
  const { rejected } = data.overview;
  if (!rejected.total) return [el("h2", { text: "Rejected rows" }), el("p", { text: "No row was rejected." })];
  const list = el("div", { class: "rejected", id: "rejected-list" });
  const note = el("p", { class: "hint", role: "status" });
  const draw = async (reason) => {
    list.replaceChildren();
    const more = async (first) => {
      const rows = await data.rejected(first, REJECTED_AT_ONCE, reason);
      list.append(...rows.map((row) => rejectedItem(data, row)));
      const all = reason ? rejected.reasons[reason] : rejected.total;
      const seen = first + rows.length;
      note.textContent = seen < all ? `${count(seen)} of ${count(all)} shown.` : `All ${count(all)} shown.`;
      if (rows.length === REJECTED_AT_ONCE && seen < all) {
        const button = el("button", { type: "button", text: "Show more", onclick: () => { button.remove(); more(seen); } });
        list.append(button);
      } else if (seen < all) {
        note.textContent += " To see the others: tokenmill inspect STORE --rule rejected, or --serve.";
      }
    };
    await more(0);
  };
  draw(chosen);
  const names = Object.entries(rejected.reasons).sort((a, b) => b[1] - a[1]);
  return [
    el("h2", { text: "Rejected rows" }),
    el("p", { text: `${count(rejected.total)} of ${count(data.overview.totals.rows_in)} rows were rejected and are not in the store. Open one to see its origin and its text.` }),
    el("div", { class: "reasons" }, ...rejected.by_file.map((one) => el("div", {},
      el("p", {}, el("strong", { text: `${count(one.count)} ${one.reason}` }), `: ${one.hint}`),
      el("ul", {}, ...one.files.map((file) => el("li", { text: `${harmless(file.path)}: ${count(file.count)} of ${count(file.rows)} rejected` }))),
      one.more ? el("p", { class: "hint", text: `and rows of ${plural(one.more, "other file")}` }) : null))),
    el("div", {}, choices("Reason", [["", `all ${count(rejected.total)}`], ...names.map(([name, rows]) => [name, `${name} ${count(rows)}`])], "", draw)),
    note, list];
}

function rejectedItem(data, row) {
  const body = el("div", { class: "rejected-body" });
  const item = el("details", { class: "rejected-row", "data-number": row.number },
    el("summary", {},
      el("span", { class: "caret", "aria-hidden": "true" }),
      el("span", { class: "reason", text: row.reason }),
      el("span", { class: "address", text: harmless(row.address) }),
      el("span", { class: "detail", text: harmless(row.detail) })),
    body);
  item.addEventListener("toggle", async () => {
    if (!item.open || body.childElementCount) return;
    const { origin } = row;
    const facts = [["file", harmless(origin.path || "unknown")], ["line", origin.line === null ? "–" : count(origin.line)],
      ["row", count(origin.row)], ["byte", origin.offset === null ? "–" : `${count(origin.offset)}, ${plural(origin.length, "byte")}`],
      ["reason", REASONS[row.reason] || row.reason]];
    body.append(el("dl", { class: "facts-list origin-facts" }, ...facts.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })])));
    try {
      body.append(rawBlock(await data.rejectedRaw(row)));
    } catch (error) {
      body.append(el("p", { class: "note", text: error.message }));
    }
    if (origin.path) body.append(el("p", { class: "hint" }, "In a terminal: ", el("code", { text: `tokenmill rows ${quoted(origin.path)} --row ${origin.row}` })));
  });
  return item;
}

const quoted = (path) => (/^[\w@%+=:,./-]+$/.test(path) ? path : `'${harmless(path).replace(/'/g, "'\\''")}'`);

function rawBlock(raw) {
  return el("div", { class: "raw-block" },
    raw.text !== null ? el("pre", { class: "raw", tabindex: 0, text: harmless(raw.text) }) : null,
    raw.cut ? el("p", { class: "hint", text: `${count(raw.cut)} more bytes are not shown.` }) : null,
    raw.note ? el("p", { class: "note", text: harmless(raw.note) }) : null);
}

function packingPanel(data, open) {
  const { packing } = data.overview;
  if (!packing.previews.length) return [el("h2", { text: "Packing" }), el("p", { text: "There are no rows to pack." })];
  const box = el("div", { id: "pack-preview" });
  const usual = packing.previews.find((one) => one.rows_longer <= packing.rows / 100) || packing.previews[packing.previews.length - 1];
  const draw = (value) => {
    const preview = packing.previews.find((one) => String(one.length) === value);
    box.replaceChildren(
      el("p", { class: "big" }, el("strong", { text: percent(preview.fill, 1, 2) }), " full: ",
        `${plural(preview.packs, "pack")} of ${count(preview.length)} tokens, ${((preview.rows - preview.rows_longer) / Math.max(1, preview.packs)).toFixed(1)} rows each`,
        preview.rows_longer ? `; ${plural(preview.rows_longer, "row")} longer than a pack and left out` : ""),
      el("figure", {}, el("figcaption", {}, el("strong", { text: "Fill" }), " of the packs"),
        bars("Packs by fill", preview.histogram, shareLabel("full"), { noun: "pack", size: "small" }), axis(PERCENTS)),
      el("h3", { text: preview.drawn.length < preview.packs ? `The first ${count(preview.drawn.length)} packs` : "All packs" }),
      packRows(preview, open));
  };
  const values = packing.previews.map((one) => [String(one.length), count(one.length)]);
  const part = packing.rows < packing.of ? `the first window of ${count(packing.rows)} of ${count(packing.of)} rows` : `all ${count(packing.rows)} rows`;
  draw(String(usual.length));
  return [
    el("h2", { text: "Packing preview" }),
    el("p", { text: `best_fit packing of ${part} in the default order (seed ${packing.seed}, epoch 0). Click a row in a pack to open it.` }),
    el("div", {}, choices("Tokens per pack", values, String(usual.length), draw)), box];
}

function tree(value) {
  if (value === null || value === undefined) return el("span", { class: "muted", text: "not set" });
  if (typeof value === "number") return el("span", { text: Number.isInteger(value) ? count(value) : String(value) });
  if (typeof value !== "object") return el("span", { class: "value", text: harmless(String(value)) });
  const entries = Object.entries(value);
  if (!entries.length) return el("span", { class: "muted", text: "none" });
  if (Array.isArray(value) && value.every((one) => typeof one !== "object" || one === null)) {
    return el("span", { class: "lines" }, ...value.map((one) => el("span", {}, tree(one))));
  }
  return el("dl", { class: "tree" }, ...entries.flatMap(([name, member]) => [el("dt", { text: harmless(name) }), el("dd", {}, tree(member))]));
}

// What the store proves, in words.
function proofSentences({ proof, totals }, audited, mismatches) {
  if (audited === undefined) return ["The proof.json of this store is missing or damaged. Its rows are not affected."];
  const { notes = {} } = proof;
  const { proven_by_trace: traced = 0, proven_by_generation_blocks: blocks = 0, proven_by_prompts: prompts = 0 } = notes.render || {};
  const ways = [[traced, "by following the template's own loop"], [blocks, "by the template's generation blocks"], [prompts, "by the row's own generation prompts"]];
  const proven = ways.filter(([rows]) => rows).map(([rows, how]) => `${plural(rows, "mask")} proven ${how}`);
  return [
    proven.length ? `${proven.join(", ")}.` : "No row of this store needs a proof: everything after the prompt is trained.",
    `${plural(audited, "row")} compared with the reference, ${count(mismatches)} different.`,
    `Renderer ${proof.renderer || "?"}, encoder ${proof.engine || "?"}, ${proof.made || "?"}.`,
    totals.rows_in ? `Every row is counted: ${count(totals.rows_in)} read, ${count(Object.values(totals.rejected).reduce((a, b) => a + b, 0))} rejected.` : null,
  ].filter(Boolean);
}

function recipePanel(data) {
  const { overview } = data;
  const { document: made, proof } = overview;
  const total = (rows) => (rows && typeof rows === "object" ? Object.values(rows).reduce((a, b) => a + b, 0) : rows);
  const audited = total(proof.audited_rows);
  const sentences = proofSentences(overview, audited, total(proof.audit_mismatches));
  const sources = made.sources.slice(0, LISTED_SOURCES).map((source, n) => ({ path: (overview.sources[n] || {}).path, ...source }));
  const left = made.sources.length - sources.length;
  return [
    el("h2", { text: "Recipe and proofs" }),
    el("p", {}, "Key ", el("code", { text: overview.key }), ", at ", el("code", { text: harmless(overview.path) })),
    el("p", { id: "model" }, "Tokenizer ", el("code", { text: harmless(proof.tokenizer || "unknown") }), ", chat template ",
      proof.chat_template ? el("code", { text: harmless(proof.chat_template) }) : "of the tokenizer"),
    el("div", { class: "columns" },
      el("section", {}, el("h3", { text: "Recipe" }), tree(made.recipe)),
      el("section", {}, el("h3", { text: "Proof" }), el("div", { id: "proof" }, ...sentences.map((text) => el("p", { text }))),
        el("details", {}, el("summary", { text: "proof.json" }), tree(proof))),
      el("section", {}, el("h3", { text: "Tokenizer" }), tree({ ...made.tokenizer, ...overview.tokenizer })),
      el("section", {}, el("h3", { text: "Totals" }), tree(overview.totals)),
      el("section", {}, el("h3", { text: "Sources by content" }), tree(sources),
        left > 0 ? el("p", { class: "hint", text: `${count(left)} more sources are in the manifest.` }) : null))];
}
