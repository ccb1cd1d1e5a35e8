// A list of any length: only visible rows are in the document. Very long results are split into
// pages, because browsers cannot scroll over more than some million pixels.

const ITEM = 64; // pixels, as in page.css
const PAGE = 50000; // rows of one page of the list
const CHUNK = 40; // rows per request

class List {
  constructor(box, open) {
    this.box = box;
    this.open = open;
    this.results = null;
    this.known = new Map();
    this.requested = new Set();
    this.page = 0;
    this.chosen = -1;
    this.spacer = el("div", { class: "spacer", role: "presentation" });
    box.append(this.spacer);
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("click", (event) => {
      const item = event.target.closest("[data-at]");
      if (item) this.choose(Number(item.dataset.at), true);
    });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  show(results, numbers = [], page = 0) {
    this.results = results;
    this.numbers = numbers;
    this.known.clear();
    this.requested.clear();
    this.chosen = -1;
    this.turn(page);
  }

  get pages() {
    return Math.max(1, Math.ceil((this.results ? this.results.total : 0) / PAGE));
  }

  get size() {
    return this.results ? Math.min(PAGE, this.results.total - this.page * PAGE) : 0;
  }

  turn(page) {
    this.page = Math.min(Math.max(page, 0), this.pages - 1);
    this.spacer.style.height = `${this.size * ITEM}px`;
    this.box.scrollTop = 0;
    this.draw();
    const pager = byId("pager");
    pager.hidden = this.pages < 2;
    byId("page-where").textContent = `page ${count(this.page + 1)} of ${count(this.pages)}`;
    byId("page-before").disabled = this.page === 0;
    byId("page-after").disabled = this.page + 1 >= this.pages;
  }

  draw() {
    if (!this.results) return;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ITEM) - 4);
    const last = Math.min(this.size, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ITEM) + 4);
    const items = [];
    for (let n = first; n < last; n++) items.push(this.item(this.page * PAGE + n, n));
    this.spacer.replaceChildren(...items);
    if (this.chosen >= 0) this.box.setAttribute("aria-activedescendant", `item-${this.chosen}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  item(at, n) {
    const row = this.known.get(at);
    const chosen = at === this.chosen;
    const made = el("div", {
      class: chosen ? "item chosen" : "item", role: "option", id: `item-${at}`, "data-at": at,
      "aria-selected": String(chosen), "aria-setsize": this.results.total, "aria-posinset": at + 1,
    });
    made.style.top = `${n * ITEM}px`;
    if (!row) {
      this.request(Math.floor(at / CHUNK));
      made.append(el("span", { class: "muted", text: "…" }));
      return made;
    }
    const bar = el("span", { class: "bar" }, el("i"));
    bar.firstChild.style.width = percent(row.trained, row.length, 1);
    made.dataset.row = row.row;
    made.append(
      el("span", { class: "number", text: `#${count(row.row)}` }),
      el("span", { class: "where" }, data.overview.drift ? driftBadge(row.drift) : null, row.group ? el("span", { class: "file first", text: `${groupText(row.group)} · ` }) : null, ...place(row.address)),
      el("span", { class: "size", text: plural(row.length, "token") }),
      el("span", { class: "preview" }, ...this.chips(row), harmless(row.preview) || "(no text)"),
      bar,
      el("span", { class: "share", text: percent(row.trained, row.length) }),
    );
    return made;
  }

  // The reward of a rollout, and the number that the list is ordered or filtered by.
  chips(row) {
    const names = new Set([...(data.overview.drift ? ["reward"] : []), ...this.numbers]);
    return [...names].filter((name) => typeof row.numbers[name] === "number").map((name) => numberChip(name, row.numbers[name]));
  }

  async request(chunk) {
    if (this.requested.has(chunk)) return;
    this.requested.add(chunk);
    const results = this.results;
    const first = chunk * CHUNK;
    try {
      const rows = await results.load(first, Math.min(first + CHUNK, results.total));
      if (results !== this.results) return;
      rows.forEach((row, n) => this.known.set(first + n, row));
      this.draw();
    } catch (error) {
      showStatus(`Cannot load rows: ${error.message}`);
    }
  }

  async choose(at, open) {
    if (!this.results || at < 0 || at >= this.results.total) return;
    const page = Math.floor(at / PAGE);
    this.chosen = at;
    if (page !== this.page) this.turn(page);
    const top = (at - page * PAGE) * ITEM;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + ITEM > this.box.scrollTop + this.box.clientHeight) {
      this.box.scrollTop = top + ITEM - this.box.clientHeight;
    }
    this.draw();
    if (!open) return;
    const row = await this.at(at);
    if (row) await this.open(row.row);
  }

  // The summary of a row of the list; undefined beyond its ends.
  async at(at) {
    if (!this.results || at < 0 || at >= this.results.total) return undefined;
    if (!this.known.has(at)) {
      const [row] = await this.results.load(at, at + 1);
      if (row) this.known.set(at, row);
    }
    return this.known.get(at);
  }

  key(event) {
    const seen = Math.max(1, Math.floor(this.box.clientHeight / ITEM) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: seen, PageUp: -seen };
    if (event.key in steps) this.choose(clamp(this.chosen + steps[event.key], 0, this.results.total - 1), true);
    else if (event.key === "Home") this.choose(0, true);
    else if (event.key === "End") this.choose(this.results.total - 1, true);
    else if (event.key === "Enter" || event.key === " ") {
      this.choose(Math.max(this.chosen, 0), true).then(() => focusRow());
    } else return;
    event.preventDefault();
  }
}

// The file, which may be shortened, and the line or row in it, which is not.
function place(address) {
  const at = Math.max(address.lastIndexOf(":"), address.lastIndexOf("#"));
  return [el("span", { class: "file", text: harmless(baseName(address.slice(0, at))) }), el("span", { class: "line", text: harmless(address.slice(at)) })];
}

const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
