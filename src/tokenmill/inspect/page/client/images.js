// Images of a row: the tokens of an image are folded into a thumbnail with its size.

// Load the images of long rows when they become visible.
const imageSight = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    imageSight.unobserve(target);
    target.dispatchEvent(new Event("seen"));
  }
});

function imageFacts(one) {
  return [`${count(one.width)} × ${count(one.height)}`, one.grid ? `grid ${one.grid.join(" × ")}` : null, plural(one.count, "token")].filter(Boolean).join(" · ");
}

// `tokens` draws a range of tokens; clicking the image shows or hides them.
function imageChip(row, one, from, to, tokens) {
  const spans = [];
  const frame = el("span", { class: "image-frame" });
  const name = harmless(one.reference);
  const chip = el("button", {
    type: "button", class: "image", "data-start": from, "data-end": to, "aria-expanded": "false", "aria-label": `image ${name}: ${imageFacts(one)}`,
    onclick: () => {
      if (spans.length) spans.splice(0).forEach((span) => span.remove());
      else spans.push(...tokens(from, to));
      chip.after(...spans);
      chip.setAttribute("aria-expanded", String(spans.length > 0));
    },
  }, frame, el("span", { class: "image-text" }, el("strong", { text: name }), el("span", { text: imageFacts(one) })));
  const note = (text) => {
    chip.classList.add("missing");
    frame.replaceChildren(el("span", { text: "no image" }));
    chip.lastChild.append(el("span", { class: "image-note", text: harmless(text) }));
  };
  chip.addEventListener("seen", async () => {
    try {
      const found = await data.image(row, one);
      if (!found || !found.src) note(found ? found.note : "left out to limit the size of the page; use --serve");
      else frame.replaceChildren(el("img", { src: found.src, alt: name }));
    } catch (error) {
      note(error.message);
    }
  }, { once: true });
  imageSight.observe(chip);
  return chip;
}
