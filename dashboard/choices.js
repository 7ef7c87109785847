// Draws HTML text of the dashboard's own and tells which of its elements with data-choice was clicked. The node outlives
// refreshes, and the focus stays on the choice that has it, so that a keyboard can be used while the page goes on.
// `data` is the gzipped text: choices.py writes it.

async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function draw(box, text) {
  if (box.kvatlasText === text) return;
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.choice : undefined;
  box.innerHTML = box.kvatlasText = text;
  if (focused === undefined) return;
  const again = [...box.querySelectorAll(":is(a, button)[data-choice]")].find((one) => one.dataset.choice === focused);
  again?.focus({ preventScroll: true });
}

export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  const box = parentElement.querySelector(".kvatlas-choices");
  box.onclick = (event) => {
    const chosen = event.target.closest("[data-choice]");
    // With a modifier key the browser does what it does with a link.
    if (!chosen || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    setTriggerValue("chosen", chosen.dataset.choice);
  };
  box.kvatlasNext = data;
  unpack(data).then((text) => {
    if (box.kvatlasNext === data) draw(box, text); // else it was overtaken
  });
}
