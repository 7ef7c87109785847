// Draws one Plotly figure in a node that outlives refreshes, so that zoom stays and nothing flickers.
// Called again with new data at every refresh of the page; `data` is the gzipped JSON of
// {plotly_url, data, layout, config, label, expires_ms}: figure_component.py writes it.

function loadPlotly(url) {
  // One copy for all figures of the page, from the dashboard's own server.
  window.kvatlasPlotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL(url, document.baseURI).href;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      window.kvatlasPlotly = undefined; // the next refresh tries again
      reject(new Error(`cannot load ${script.src}`));
    };
    document.head.append(script);
  });
  return window.kvatlasPlotly;
}

async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function draw(frame, bytes) {
  const figure = await unpack(bytes);
  const Plotly = await loadPlotly(figure.plotly_url);
  const plot = frame.querySelector(".kvatlas-plot");
  const family = getComputedStyle(frame).fontFamily;
  figure.layout.font.family = family;
  figure.layout.hoverlabel.font.family = family;
  await Plotly.react(plot, figure.data, figure.layout, figure.config);
  frame.setAttribute("aria-label", figure.label);
  frame.dataset.drawn = String(Number(frame.dataset.drawn ?? 0) + 1);
  frame.classList.remove("kvatlas-late");
  clearTimeout(frame.kvatlasTimer);
  if (figure.expires_ms) {
    // The server may die under an open page: an old picture must not pass for the present.
    frame.kvatlasTimer = setTimeout(() => frame.classList.add("kvatlas-late"), figure.expires_ms);
  }
}

export default function (component) {
  const frame = component.parentElement.querySelector(".kvatlas-figure");
  // Draws are in order, and a figure that was overtaken while waiting is never drawn.
  frame.kvatlasNext = component.data;
  frame.kvatlasQueue = (frame.kvatlasQueue ?? Promise.resolve()).then(async () => {
    const bytes = frame.kvatlasNext;
    if (!bytes) return;
    frame.kvatlasNext = null;
    try {
      await draw(frame, bytes);
    } catch (error) {
      frame.dataset.error = String(error);
      console.error("KVAtlas figure:", error);
    }
  });
  return () => clearTimeout(frame.kvatlasTimer);
}
