// The rows of a group: their prompt once, then the answers side by side from where they part.

const groupText = (group) => `group ${count(group.number)}${group.answer ? `, ${group.answer}` : ""}`;

function groupFacts(group) {
  return el("p", { class: "facts" },
    group.prompt_tokens === null ? null : el("span", { text: `${plural(group.prompt_tokens, "token")} of the prompt` }),
    group.margin === null ? null : el("span", { class: "margin", text: `margin ${group.margin}` }));
}

function groupedRows(rows) {
  const parting = rows[0].group.prompt_tokens;
  const numbers = (row) => [
    ...(row.group.score === null ? [] : [`score ${row.group.score}`]),
    ...attachedPerRow(row).map(([name, value]) => harmless(`${name} ${value}`))];
  return el("div", { class: "comparison" },
    parting === null ? el("p", { class: "note", text: "The template writes the prompt differently for different answers, so each stands whole." }) : null,
    parting ? el("div", { id: "prompt" }, el("h3", { text: "Prompt" }), turnsOf(rows[0], { side: "prompt", to: parting })) : null,
    el("div", { class: "sides answers" }, ...rows.map((row, place) => sideOf(row.group.answer, row, numbers(row), { side: `answer-${place}`, from: parting || 0 }))));
}
