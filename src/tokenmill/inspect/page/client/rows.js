// One row: turns and tokens. Colour shows role and loss; an underline shows the loss without colour.
// The token under the pointer or the keyboard focus shows its id and bytes.

const look = { colour: "both", spaces: false, ids: false, group: true };
const SHOWN_TOKENS = 4000; // of a turn at once; a button shows more

const ROLES = ["system", "user", "assistant", "tool"];
const roleClass = (role) => (ROLES.includes(role) ? `role-${role}` : "role-other");

function fillToken(span, row, at, text) {
  if (text === null || text === "") {
    span.classList.add("part");
    span.append(text === null ? "⋯" : "∅");
  } else {
    fillText(span, text);
  }
  if (look.ids) span.append(el("sub", { text: row.ids[at] }));
}

function fillText(span, text) {
  let shown = harmless(text).replace(/\t/g, "⇥");
  if (look.spaces) shown = shown.replace(/ /g, "·").replace(/\u00a0/g, "⍽");
  shown.split("\n").forEach((line, n) => {
    if (n) span.append(el("i", { class: "end", text: "⏎" }), "\n");
    if (line) span.append(line);
  });
}

function tokenSpan(row, texts, at, role, marks) {
  const id = row.ids[at];
  let kind = row.mask[at] ? "tok trained" : "tok";
  if (row.special(id)) kind += " special";
  if (marks && marks[at]) kind += ` ${marks[at]}`;
  const span = el("span", { class: kind, tabindex: -1, "data-at": at });
  fillToken(span, row, at, texts[at]);
  const scale = scaleOf();
  if (scale && row.mask[at] && Array.isArray(row.attached[scale.name])) heat(span, row.attached[scale.name][at], scale);
  return span;
}

// Colour a value by its distance from 0, relative to the end of its scale.
function heat(span, value, scale) {
  if (typeof value !== "number") return;
  const below = value < 0 || !scale.high;
  const end = below ? scale.low : scale.high;
  span.classList.add("heat", below ? "below" : "above");
  span.style.setProperty("--heat", String(end ? clamp(value / end, 0, 1) : 0));
}

const scaleOf = () => (look.colour.startsWith("value:") ? data.overview.scales.find((one) => `value:${one.name}` === look.colour) : undefined);
const colourClass = () => (look.colour.startsWith("value:") ? "colour-value" : `colour-${look.colour}`);

function describe(row, texts, at, role) {
  const id = row.ids[at];
  const bytes = row.piece(id);
  const text = texts[at];
  const lines = [
    ["id", String(id)],
    ["bytes", bytes.length ? hex(bytes.subarray(0, 64)) + (bytes.length > 64 ? " …" : "") : "none"],
    ["text", text === null ? "part of a character" : harmless(JSON.stringify(text).slice(0, 200))],
    ["loss", row.mask[at] ? "trained" : "not trained"],
    ["turn", harmless(role) + (row.special(id) ? ", control token" : "")],
    ["token", `${count(at)} of ${count(row.ids.length)}`],
  ];
  for (const [name, values] of Object.entries(row.attached)) {
    if (Array.isArray(values)) lines.push([harmless(name), String(values[at])]);
  }
  for (const one of row.findings) if (one.token === at) lines.push(["finding", harmless(`${one.class || UNCHECKED}: ${one.kind}`)]);
  return el("dl", {}, ...lines.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value, class: `tip-${name}` })]));
}

let tipOf = null;

function showTip(target, content) {
  const tip = byId("tip");
  tip.replaceChildren(content);
  tip.hidden = false;
  tipOf = target;
  placeTip();
}

function placeTip() {
  const tip = byId("tip");
  const target = tipOf;
  const box = target.getClientRects()[0] || target.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = clamp(box.left, 8, Math.max(8, innerWidth - size.width - 8));
  const below = box.bottom + 8;
  const top = below + size.height > innerHeight - 8 ? Math.max(8, box.top - size.height - 8) : below;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

const hideTip = () => {
  byId("tip").hidden = true;
  tipOf = null;
};

// Moving to a token by key may scroll; its tip must move with it.
const scrolled = () => {
  if (tipOf && tipOf === document.activeElement) placeTip();
  else if (tipOf) hideTip();
};

function shareBar(trained, length) {
  const bar = el("span", { class: "bar wide" }, el("i"));
  bar.firstChild.style.width = percent(trained, length, 2);
  return bar;
}

// The turns of a row, or of its tokens in a range. `marks` adds a class per token (such as the
// changes of a comparison); `side` distinguishes the columns of one view.
function turnsOf(row, { marks, side = "one", from = 0, to = row.ids.length } = {}) {
  const texts = shownTexts(row);
  const box = el("div", { class: `turns ${colourClass()}` });
  const covered = row.turns.length ? row.turns[row.turns.length - 1][2] : 0;
  const all = covered < row.ids.length ? [...row.turns, ["(no turn)", covered, row.ids.length]] : row.turns;
  const turns = all.map(([role, start, end]) => [role, Math.max(start, from), Math.min(end, to)]).filter(([, start, end]) => start < end);
  turns.forEach(([role, start, end], number) => {
    let trained = 0;
    for (let at = start; at < end; at++) trained += row.mask[at];
    const body = el("div", { class: "tokens", id: `turn-${number}-${side}` });
    const head = el("button", {
      class: "turn-head", type: "button", "aria-expanded": "true", "aria-controls": body.id,
      onclick: () => toggle(section, head.getAttribute("aria-expanded") !== "true"),
    },
    el("span", { class: "caret", "aria-hidden": "true" }),
    el("span", { class: "role", text: harmless(role) }),
    el("span", { class: "muted", text: plural(end - start, "token") }),
    el("span", { class: trained ? "loss some" : "loss", text: trained ? `${count(trained)} trained` : "not trained" }));
    const section = el("section", { class: `turn ${roleClass(role)}`, "data-start": start, "data-end": end }, head, body);
    const tokens = (first, last) => Array.from({ length: last - first }, (_, n) => tokenSpan(row, texts, first + n, role, marks));
    const images = new Map(row.media.filter((one) => one.count && one.start < end && one.start + one.count > start).map((one) => [Math.max(one.start, start), one]));
    const more = (first) => {
      const made = [];
      let last = first;
      while (last < end && made.length < SHOWN_TOKENS) {
        const image = images.get(last);
        const next = image ? Math.min(end, image.start + image.count) : last + 1;
        made.push(...(image ? [imageChip(row, image, last, next, tokens)] : tokens(last, next)));
        last = next;
      }
      body.append(...made);
      if (last < end) {
        const button = el("button", { type: "button", class: "more", text: `show more (${count(end - last)} tokens left)`, onclick: () => { button.remove(); more(last); } });
        body.append(button);
      }
    };
    more(start);
    box.append(section);
  });
  const tokenOf = (target) => target.closest && target.closest(".tok");
  const showDetails = (event) => {
    const span = tokenOf(event.target);
    if (!span) return;
    const at = Number(span.dataset.at);
    const turn = turns.find((one) => one[1] <= at && at < one[2]);
    showTip(span, describe(row, texts, at, turn ? turn[0] : ""));
  };
  box.addEventListener("mouseover", showDetails);
  box.addEventListener("mouseout", hideTip);
  box.addEventListener("focusin", showDetails);
  box.addEventListener("focusout", hideTip);
  box.addEventListener("click", (event) => { const span = tokenOf(event.target); if (span) focusToken(span); });
  box.addEventListener("keydown", walk);
  const first = box.querySelector(".tok");
  if (first) first.tabIndex = 0;
  return box;
}

function toggle(section, open) {
  section.querySelector(".turn-head").setAttribute("aria-expanded", String(open));
  section.querySelector(".tokens").hidden = !open;
}

function focusToken(span) {
  const box = span.closest(".turns");
  const current = box.querySelector('.tok[tabindex="0"]');
  if (current) current.tabIndex = -1;
  span.tabIndex = 0;
  span.focus();
}

// The next token in a direction; it may be in the next open turn.
function beside(span, step) {
  const sibling = step > 0 ? "nextElementSibling" : "previousElementSibling";
  let next = span[sibling];
  while (next && !next.classList.contains("tok")) next = next[sibling]; // an image in between
  if (next) return next;
  let section = span.closest(".turn");
  while (section) {
    section = step > 0 ? section.nextElementSibling : section.previousElementSibling;
    if (!section) return null;
    const body = section.querySelector(".tokens");
    const all = body.hidden ? [] : body.querySelectorAll(".tok");
    if (all.length) return step > 0 ? all[0] : all[all.length - 1];
  }
  return null;
}

function aboveOrBelow(span, step) {
  const from = span.getBoundingClientRect();
  let best = null;
  let line = null;
  for (let next = beside(span, step); next; next = beside(next, step)) {
    const box = next.getBoundingClientRect();
    if (Math.abs(box.top - from.top) < 4) continue;
    if (line !== null && Math.abs(box.top - line) > 4) break;
    line = box.top;
    const distance = Math.abs(box.left - from.left);
    if (best && distance > best[0]) break;
    best = [distance, next];
  }
  return best && best[1];
}

function walk(event) {
  const span = event.target.closest(".tok");
  if (!span) return;
  const tokens = span.parentElement.querySelectorAll(".tok");
  const next = {
    ArrowRight: () => beside(span, 1), ArrowLeft: () => beside(span, -1),
    ArrowDown: () => aboveOrBelow(span, 1), ArrowUp: () => aboveOrBelow(span, -1),
    Home: () => tokens[0], End: () => tokens[tokens.length - 1],
  }[event.key];
  if (!next) return;
  event.preventDefault();
  const found = next();
  if (found) focusToken(found);
}

function choices(name, values, current, changed) {
  const box = el("div", { class: "choices", role: "radiogroup", "aria-label": name });
  for (const [value, label] of values) {
    const input = el("input", { type: "radio", name, value, onchange: () => changed(value) });
    input.checked = value === current;
    box.append(el("label", {}, input, el("span", { text: label })));
  }
  return box;
}

// The label at an end of a scale; values beyond have the colour of the end.
const scaleEnd = (value, more) => (value ? `${value > 0 ? "" : "−"}${Math.abs(value)} ${more}` : "0");

function scaleLegend(scale) {
  const steps = Array.from({ length: 13 }, (_, n) => scale.low + ((scale.high - scale.low) * n) / 12);
  return el("div", { class: "legend turns colour-value", "aria-label": "Legend" },
    el("span", { text: harmless(scale.name) }),
    el("span", { class: "scale" },
      el("span", { class: "scale-low", text: scaleEnd(scale.low, "or less") }),
      el("span", { class: "ramp", "aria-hidden": "true" }, ...steps.map((value) => { const step = el("i"); heat(step, value, scale); return step; })),
      el("span", { class: "scale-high", text: scaleEnd(scale.high, "or more") })),
    el("span", { text: "Only trained tokens are coloured." }));
}

function legend() {
  const scale = scaleOf();
  if (scale) return scaleLegend(scale);
  const swatch = (kind, text) => el("span", { class: "swatch" }, el("span", { class: kind, text: "text" }), ` ${text}`);
  const turn = (role) => el("span", { class: `turn ${roleClass(role)}` }, el("span", { class: "tok", text: role }));
  return el("div", { class: `legend turns ${colourClass()}`, "aria-label": "Legend" },
    el("span", { class: "turn role-assistant" }, swatch("tok trained", "trained")),
    el("span", { class: "turn role-assistant" }, swatch("tok", "not trained")),
    el("span", { class: "turn role-assistant" }, swatch("tok special", "control token")),
    ...(look.colour === "loss" ? [] : ROLES.map(turn)));
}

function toolbar(redraw, offersGroup) {
  const check = (name, label) => {
    const input = el("input", { type: "checkbox", id: `look-${name}`, onchange: () => { look[name] = input.checked; redraw(); } });
    input.checked = look[name];
    return el("label", { class: "check" }, input, el("span", { text: label }));
  };
  const all = (open) => () => document.querySelectorAll("#view section.turn").forEach((section) => toggle(section, open));
  return el("div", { class: "toolbar" },
    choices("Colour by", [["both", "role and loss"], ["role", "role"], ["loss", "loss"], ...data.overview.scales.map((one) => [`value:${one.name}`, harmless(one.name)])], look.colour, (value) => { look.colour = value; redraw(); }),
    check("spaces", "spaces"), check("ids", "ids"), offersGroup ? check("group", "whole group") : null,
    el("span", { class: "gap" }),
    el("button", { type: "button", id: "fold", text: "Fold turns", onclick: all(false) }),
    el("button", { type: "button", id: "unfold", text: "Unfold", onclick: all(true) }));
}

// Per-row values of sidecars, without those that an extra column of the same name shows.
const attachedPerRow = (row) => Object.entries(row.attached).filter(([name, value]) => !Array.isArray(value) && !(name in row.extra));

// The head of a row, or of its group; in a group each answer shows its own numbers.
function rowHead(row, step, wholeGroup) {
  const { group } = row;
  const recorded = group && group.name !== null;
  // In a recorded group each answer shows its columns; for one answer the title shows group and step.
  const extra = Object.entries(row.extra).filter(([name]) => !recorded || (!wholeGroup && !["group", "step"].includes(name)));
  const notes = [...extra.filter(([name]) => !data.overview.drift || name !== "reward"), ...(wholeGroup ? [] : attachedPerRow(row))];
  const oneTurn = row.part && (!group || group.rows.length === 1);
  return el("header", { class: "row-head" },
    el("div", { class: "title" },
      el("h2", { id: "row-title", text: wholeGroup ? `Group ${groupName(group)}` : `Row ${count(row.row)}` }),
      group ? el("span", { class: "muted", text: wholeGroup ? groupRows(group) : groupText(group) }) : null,
      wholeGroup ? null : verdictOf(row),
      oneTurn ? el("span", { class: "muted", text: `turn ${row.part} of its source row` }) : null,
      el("span", { class: "gap" }),
      el("button", { type: "button", text: "↑ previous", "aria-keyshortcuts": "k", onclick: () => step(-1) }),
      el("button", { type: "button", text: "↓ next", "aria-keyshortcuts": "j", onclick: () => step(1) })),
    recorded && wholeGroup ? null : el("p", { class: "facts" },
      el("span", { class: "origin", text: harmless(row.address) }),
      row.origin.offset !== null ? el("span", { class: "muted", text: `byte ${count(row.origin.offset)}, ${plural(row.origin.length, "byte")}` }) : null),
    wholeGroup ? groupFacts(group) : el("p", { class: "facts" },
      el("span", { text: plural(row.length, "token") }),
      el("span", { class: "trained-count", text: `${count(row.trained)} trained (${percent(row.trained, row.length)})` }),
      shareBar(row.trained, row.length),
      row.media.length ? el("span", { text: plural(row.media.length, "image") }) : null,
      group && group.score !== null ? el("span", { text: `score ${group.score}` }) : null),
    notes.length
      ? el("dl", { class: "extra" }, ...notes.flatMap(([name, value]) => [
        el("dt", { text: harmless(name) }), el("dd", { text: harmless(typeof value === "string" ? value : JSON.stringify(value)) })]))
      : null,
    wholeGroup ? null : findingsOf(row));
}
