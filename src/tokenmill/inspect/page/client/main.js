// Tabs, filters, the selected row, keyboard shortcuts.

const TABS = [["rows", "Rows"], ["overview", "Overview"], ["rejected", "Rejected"], ["packing", "Packing"], ["recipe", "Recipe and proofs"], ["compare", "Compare"]];
const drawn = new Set();
let finding = 0;
let showing = 0;
let current = null;
let data;
let list;

const showStatus = (text) => {
  byId("status").textContent = text;
};

function showTab(name, focus) {
  hideTip();
  for (const [one] of TABS) {
    const tab = byId(`tab-${one}`);
    if (!tab) continue;
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
    byId(`panel-${one}`).hidden = one !== name;
    if (one === name && focus) tab.focus();
  }
  document.body.dataset.tab = name;
  if (drawn.has(name) || name === "rows") return;
  drawn.add(name);
  const panels = {
    overview: () => overviewPanel(data, filterBy), rejected: () => rejectedPanel(data, ""),
    packing: () => packingPanel(data, openRow), recipe: () => recipePanel(data), compare: () => comparePanel(data, filterBy),
  };
  byId(`panel-${name}`).append(...panels[name]().filter(Boolean));
}

const shownTabs = () => TABS.filter(([name]) => name !== "compare" || data.compare);

function makeTabs() {
  const shown = shownTabs();
  for (const [name, label] of shown) {
    const rejected = name === "rejected" ? data.overview.rejected.total : 0;
    byId("tabs").append(el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => showTab(name) },
      label, rejected ? el("span", { class: "count", text: count(rejected) }) : null));
  }
  byId("tabs").addEventListener("keydown", (event) => {
    const at = shown.findIndex(([name]) => byId(`tab-${name}`) === document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (at < 0 || !step) return;
    event.preventDefault();
    showTab(shown[(at + step + shown.length) % shown.length][0], true);
  });
}

function makeHead() {
  const { overview } = data;
  const { totals } = overview;
  const rejected = Object.values(totals.rejected).reduce((sum, one) => sum + one, 0);
  byId("name").textContent = overview.name;
  byId("name").title = overview.path;
  const facts = [["rows", count(totals.rows)], ["tokens", count(totals.tokens)], ["trained", percent(totals.trained_tokens, totals.tokens, 1)], ["rejected", count(rejected)]];
  byId("totals").append(...facts.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
  byId("selection").textContent = data.selection;
  overview.sources.forEach((source, n) => byId("source").append(el("option", { value: n, text: harmless(baseName(source.path)), title: source.path })));
  overview.roles.forEach((role) => byId("role").append(el("option", { value: role.role, text: harmless(role.role) })));
  byId("changed-label").hidden = !data.compare;
  byId("where-label").hidden = !(data instanceof ServedData);
  makeNumberFilters(overview);
}

// Filters and orders by drift classes and by numbers per row, which only some stores have.
function makeNumberFilters({ drift, numbers }) {
  const order = (value, text) => byId("order").append(el("option", { value, text }));
  byId("drift-label").hidden = !drift;
  byId("number-range").hidden = !numbers.some((one) => one.filter);
  if (drift) {
    for (const name of [...CLASSES, UNCHECKED]) if (drift[name]) byId("drift").append(el("option", { value: name, text: `${name} (${count(drift[name])})` }));
    order("drift", "most severe drift first");
  }
  for (const { name, filter } of numbers) {
    if (filter) byId("number").append(el("option", { value: name, text: harmless(name) }));
    order(`highest:${name}`, `highest ${harmless(name)} first`);
    order(`lowest:${name}`, `lowest ${harmless(name)} first`);
  }
}

const FIELDS = { source: "source", role: "role", least: "least", most: "most", shareLeast: "share-least", shareMost: "share-most", drift: "drift", numberLeast: "number-least", numberMost: "number-most", where: "where" };

function query() {
  const number = (id, scale = 1) => {
    const text = byId(id).value.trim().replace(/[,_]/g, "");
    return text === "" || !Number.isFinite(Number(text)) ? null : Number(text) / scale;
  };
  const conditions = [];
  const between = (name, least, most, value) => {
    if (least !== null) conditions.push(condition(name, ">=", least, value));
    if (most !== null) conditions.push(condition(name, "<=", most, value));
  };
  between("length", number("least"), number("most"), (row) => row.length);
  between("trained / length", number("share-least", 100), number("share-most", 100), trainedShare);
  const source = data.overview.sources[byId("source").value];
  if (source) conditions.push(condition("source", "==", source.path || "", (row) => row.origin.path || ""));
  const drift = byId("drift").value;
  if (drift === UNCHECKED) conditions.push(condition("extra.drift", "not in", CLASSES, (row) => row.drift));
  else if (drift) conditions.push(condition("extra.drift", "==", drift, (row) => row.drift));
  const ranged = data.overview.numbers.find((one) => one.name === byId("number").value);
  if (ranged) between(ranged.filter, number("number-least"), number("number-most"), (row) => row.numbers[ranged.name]);
  const isRanged = byId("number-least").value.trim() || byId("number-most").value.trim();
  return {
    conditions, where: byId("where").value.trim(), role: byId("role").value, changed: byId("changed").checked,
    text: byId("search").value, start: 0, order: byId("order").value, numbers: ranged && isRanged ? [ranged.name] : [],
  };
}

async function find(requested = query()) {
  const request = ++finding;
  const set = Object.values(FIELDS).filter((id) => byId(id).value !== "").length + (byId("changed").checked ? 1 : 0);
  byId("active").textContent = set ? `(${set} set)` : "";
  showStatus(requested.text ? "Searching…" : "");
  try {
    const results = await data.find(requested, (part, found) => showStatus(`Searched ${percent(part, 1)}, ${plural(found, "row")} so far`), () => request !== finding);
    if (!results || request !== finding) return;
    list.show(results, [numberOrder(requested.order)[1], ...requested.numbers].filter((name) => name !== null));
    const all = results.total === results.of && !requested.text;
    showStatus(all ? plural(results.total, "row") : `${plural(results.total, "row")} of ${count(results.of)}`);
    if (results.searched < results.of) {
      byId("status").append(`, searched up to row ${count(results.searched)} `,
        el("button", { type: "button", class: "link", text: "continue", onclick: () => find({ ...requested, start: results.searched }) }));
    }
    if (current !== null) {
      const place = await results.place(current);
      if (request === finding && place >= 0) list.choose(place, false);
    }
  } catch (error) {
    if (request === finding) showStatus(error.message);
  }
}

function filterBy(requested) {
  byId("filters").reset();
  for (const [name, value] of Object.entries(requested)) {
    if (name === "changed") byId("changed").checked = value;
    else if (name === "number") byId("number").value = value;
    else byId(FIELDS[name]).value = value;
  }
  byId("more").open = true;
  showTab("rows");
  find();
}

// Whether to show a row together with its group.
const offersGroup = (row) => Boolean(!data.compare && row.group && row.group.rows.length > 1);
const showsGroup = (row) => look.group && offersGroup(row);

// Go to the next or previous row of the list, or to another group if groups are shown.
async function step(by) {
  const here = list.known.get(list.chosen);
  let at = list.chosen + by;
  if (here && showsGroup(here)) {
    const same = (row) => row && row.group && row.group.number === here.group.number;
    while (same(await list.at(at))) at += by;
  }
  await list.choose(at, true);
}

async function showRow(number) {
  const view = byId("view");
  const request = ++showing;
  hideTip();
  let row;
  try {
    row = await data.row(number);
    if (request !== showing) return; // another row was requested meanwhile
  } catch (error) {
    view.replaceChildren(el("p", { class: "note", text: error.message }));
    return;
  }
  if (!row) {
    view.replaceChildren(el("div", { class: "empty" }, el("p", { text: `Row ${count(number)} is not in this page.` }), el("p", { class: "muted", text: data.selection })));
    return;
  }
  current = row.row;
  const head = el("div", {});
  const body = el("div", { id: "row-body" });
  const members = async () => (await Promise.all(row.group.rows.map((number) => data.row(number)))).filter(Boolean);
  const draw = async () => {
    head.replaceChildren(rowHead(row, step, showsGroup(row)));
    const folded = [...view.querySelectorAll("section.turn")].map((one) => one.querySelector(".turn-head").getAttribute("aria-expanded") === "false");
    let made;
    try {
      if (data.compare) made = comparedRow(await data.compared(row.row));
      else made = showsGroup(row) ? groupedRows(await members()) : turnsOf(row, { marks: findingMarks(row) });
    } catch (error) {
      made = el("p", { class: "note", text: error.message });
    }
    if (request !== showing) return;
    body.replaceChildren(legend(), made);
    const sections = body.querySelectorAll("section.turn");
    if (sections.length === folded.length) sections.forEach((section, n) => { if (folded[n]) toggle(section, false); });
  };
  const source = data instanceof ServedData ? el("details", { class: "source-row" }, el("summary", { text: "Source row" })) : null;
  if (source) {
    source.addEventListener("toggle", async () => {
      if (!source.open || source.childElementCount > 1) return;
      try {
        source.append(rawBlock(await data.raw(row.row)));
      } catch (error) {
        source.append(el("p", { class: "note", text: error.message }));
      }
    });
  }
  view.replaceChildren(head, source || "", toolbar(draw, offersGroup(row)), body);
  view.scrollTop = 0;
  await draw();
  history.replaceState(null, "", `#row=${row.row}`);
}

function focusRow() {
  const first = document.querySelector('#view .tok[tabindex="0"]');
  (first && first.offsetParent ? first : byId("view")).focus();
}

async function openRow(number) {
  showTab("rows");
  await showRow(number);
  if (!list.results) return;
  const place = await list.results.place(number);
  if (place >= 0) await list.choose(place, false);
}

let started = false; // whether the first row is shown
const KEYS = [["/", "search"], ["g", "go to a row by number"], ["j, k", "next and previous row, or group"], ["↑ ↓ in the list", "select a row; Enter opens it"], ["← → ↑ ↓ in a row", "move by token, and show its id and bytes"], ["f", "fold or unfold all turns"], ["Esc", "back to the list"], ["?", "this help"]];

function help() {
  byId("help").replaceChildren(el("h2", { text: "Keys" }), el("dl", {}, ...[...KEYS, [`1 … ${shownTabs().length}`, shownTabs().map(([, label]) => label).join(", ")]].flatMap(([key, text]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text })])),
    el("form", { method: "dialog" }, el("button", { text: "Close" })));
  byId("help").showModal();
}

function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const typing = event.target.matches("input:not([type=checkbox]):not([type=radio]), select, textarea");
  if (event.key === "Escape") {
    if (typing && event.target.value && event.target.id === "search") return;
    showTab("rows");
    byId("list").focus();
    return;
  }
  if (typing) return;
  const tab = shownTabs()[Number(event.key) - 1];
  if (event.key === "/") { showTab("rows"); byId("search").focus(); byId("search").select(); }
  else if (event.key === "g") { showTab("rows"); byId("jump").focus(); byId("jump").select(); }
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "f") {
    const open = document.querySelector('#view .turn-head[aria-expanded="true"]');
    document.querySelectorAll("#view section.turn").forEach((section) => toggle(section, !open));
  } else if (event.key === "?") help();
  else if (tab && byId(`tab-${tab[0]}`)) showTab(tab[0], true);
  else return;
  event.preventDefault();
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    byId("view").textContent = "This browser is too old for this page. Use Chrome or Edge 80, Safari 16.4, Firefox 113, or later.";
    return;
  }
  const { about, rows } = JSON.parse(byId("data").textContent);
  data = rows ? new FileData(await decompressed(about), rows) : new ServedData(await decompressed(about));
  makeTabs();
  makeHead();
  list = new List(byId("list"), async (number) => {
    await showRow(number);
    // On a narrow screen the row is below the list.
    if (matchMedia("(max-width: 50rem)").matches && started) byId("view").scrollIntoView();
  });
  showTab("rows");
  let waiting;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(() => find(), 150); };
  byId("filters").addEventListener("input", (event) => { if (event.target.id !== "jump") soon(); });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("clear").addEventListener("click", () => { byId("filters").reset(); find(); });
  byId("search").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "ArrowDown") return;
    event.preventDefault();
    byId("list").focus();
    if (list.results && list.results.total) list.choose(Math.max(list.chosen, 0), true);
  });
  byId("jump").addEventListener("keydown", (event) => {
    const number = Number(byId("jump").value.trim().replace(/[#,_]/g, ""));
    if (event.key !== "Enter") return;
    event.preventDefault();
    if (Number.isInteger(number) && byId("jump").value.trim()) openRow(number);
  });
  byId("page-before").addEventListener("click", () => list.turn(list.page - 1));
  byId("page-after").addEventListener("click", () => list.turn(list.page + 1));
  document.addEventListener("keydown", shortcut);
  document.addEventListener("scroll", scrolled, { passive: true, capture: true });
  await data.open();
  await find();
  const linked = /^#row=(\d+)$/.exec(location.hash);
  if (linked) await openRow(Number(linked[1]));
  else if (list.results && list.results.total) await list.choose(0, true);
  else byId("view").append(el("div", { class: "empty" }, el("p", { text: "There are no rows to show." })));
  started = true;
}

start()
  .catch((error) => showStatus(`Cannot load this page: ${error.message}`))
  .finally(() => { document.body.dataset.ready = "yes"; });
