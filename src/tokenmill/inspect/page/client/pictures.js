// Pictures of a row: the tokens that stand for one are folded into a small picture with its facts.

// Pictures of long rows are asked for when they come into sight.
const pictureSight = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    pictureSight.unobserve(target);
    target.dispatchEvent(new Event("seen"));
  }
});

function pictureFacts(one) {
  return [`${count(one.width)} × ${count(one.height)}`, one.grid ? `grid ${one.grid.join(" × ")}` : null, plural(one.count, "token")].filter(Boolean).join(" · ");
}

// `tokens` draws the tokens from one place to another; pressing the picture shows and folds them.
function pictureChip(row, one, from, to, tokens) {
  const spans = [];
  const frame = el("span", { class: "picture-frame" });
  const name = harmless(one.reference);
  const chip = el("button", {
    type: "button", class: "picture", "data-start": from, "data-end": to, "aria-expanded": "false", "aria-label": `picture ${name}: ${pictureFacts(one)}`,
    onclick: () => {
      if (spans.length) spans.splice(0).forEach((span) => span.remove());
      else spans.push(...tokens(from, to));
      chip.after(...spans);
      chip.setAttribute("aria-expanded", String(spans.length > 0));
    },
  }, frame, el("span", { class: "picture-text" }, el("strong", { text: name }), el("span", { text: pictureFacts(one) })));
  const note = (text) => {
    chip.classList.add("missing");
    frame.replaceChildren(el("span", { text: "no picture" }));
    chip.lastChild.append(el("span", { class: "picture-note", text: harmless(text) }));
  };
  chip.addEventListener("seen", async () => {
    try {
      const found = await data.picture(row, one);
      if (!found || !found.src) note(found ? found.note : "not in this page, which has pictures up to a bound; --serve shows them all");
      else frame.replaceChildren(el("img", { src: found.src, alt: name }));
    } catch (error) {
      note(error.message);
    }
  }, { once: true });
  pictureSight.observe(chip);
  return chip;
}
