// The rows of a group: the common prompt once, then the answers side by side.

const ANSWERS_AT_ONCE = 8; // of a group; a button shows more

const groupName = (group) => (group.name === null ? count(group.number) : harmless(group.name));
const groupText = (group) => `group ${groupName(group)}${group.answer ? `, ${group.answer}` : ""}`;

function groupRows({ name, rows }) {
  if (name === null) return `rows ${count(rows[0])} to ${count(rows[rows.length - 1])}`;
  return plural(rows.length, "answer");
}

// The number of equal tokens of recorded answers before the first sampled token.
function commonPrompt(rows) {
  let at = 0;
  const [first] = rows;
  while (at < first.ids.length && rows.every((row) => row.ids[at] === first.ids[at] && !row.mask[at])) at++;
  return at;
}

function groupFacts(group) {
  return el("p", { class: "facts" },
    group.prompt_tokens === null ? null : el("span", { text: `prompt: ${plural(group.prompt_tokens, "token")}` }),
    group.margin === null ? null : el("span", { class: "margin", text: `margin ${group.margin}` }));
}

function groupedRows(rows) {
  const { group } = rows[0];
  const recorded = group.name !== null;
  const parting = recorded ? commonPrompt(rows) : group.prompt_tokens;
  const numbers = (row) => [
    ...(row.group.score === null ? [] : [`score ${row.group.score}`]),
    ...(recorded && typeof row.numbers.advantage === "number" ? [`advantage ${row.numbers.advantage}`] : []),
    ...attachedPerRow(row).map(([name, value]) => harmless(`${name} ${value}`))];
  const missing = group.rows.length - rows.length;
  const marks = rows.map(findingMarks);
  // The prompt is shown once, with the findings of all answers in it.
  const promptMarks = Object.assign([], ...[...marks].reverse());
  const box = el("div", { class: "sides answers" });
  const more = (first) => {
    rows.slice(first, first + ANSWERS_AT_ONCE).forEach((row, n) => {
      const side = sideOf(row.group.answer, row, numbers(row), { side: `answer-${first + n}`, from: parting || 0, marks: marks[first + n] });
      if (row.row === current) side.classList.add("current");
      if (recorded) side.querySelector(".facts").after(...[verdictOf(row), findingsOf(row)].filter(Boolean));
      box.append(side);
    });
    const left = rows.length - first - ANSWERS_AT_ONCE;
    if (left <= 0) return;
    const button = el("button", { type: "button", class: "more-answers", text: `show more (${plural(left, "answer")} left)`, onclick: () => { button.remove(); more(first + ANSWERS_AT_ONCE); } });
    box.append(button);
  };
  more(0);
  return el("div", { class: "comparison" },
    missing ? el("p", { class: "note", text: `${plural(missing, "answer")} of this group ${missing === 1 ? "is" : "are"} not in this page.` }) : null,
    parting === null ? el("p", { class: "note", text: "The prompt is rendered differently for different answers, so each row is shown completely." }) : null,
    parting ? el("div", { id: "prompt" }, el("h3", { text: "Prompt" }), turnsOf(rows[0], { side: "prompt", to: parting, marks: promptMarks })) : null,
    box);
}
