// What a page must hold for every reader, asked of the page as it is. Each check returns what it found wrong.
// Text that is drawn on a canvas, as tables of st.dataframe are, is outside what the DOM can tell.

(() => {
  const shown = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const forReadersOnly = (node) => {
    const box = node.getBoundingClientRect();
    return box.width <= 1 || box.height <= 1;
  };

  function* texts() {
    const walker = document.createTreeWalker(document.querySelector(".stApp"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode, parent = text.parentElement;
      if (!text.textContent.trim() || parent.closest("script, style, noscript, canvas, [data-checks=skip]")) continue;
      if (shown(parent) && !forReadersOnly(parent)) yield [text, parent];
    }
  }

  const rectsOf = (text) => {
    const range = document.createRange();
    range.selectNodeContents(text);
    return [...range.getClientRects()].filter((rect) => rect.width > 0.5 && rect.height > 0.5);
  };

  // Cut off with no way to scroll to it: by an ancestor that hides what overflows, or at the left or top of the page.
  function clipped(slack = 2) {
    const found = [];
    for (const [text, parent] of texts()) {
      for (let node = parent; node && node !== document.body; node = node.parentElement) {
        const style = getComputedStyle(node), box = node.getBoundingClientRect();
        const cutsX = ["hidden", "clip"].includes(style.overflowX), cutsY = ["hidden", "clip"].includes(style.overflowY);
        const outside = rectsOf(text).some((rect) =>
          (cutsX && (rect.right > box.right + slack || rect.left < box.left - slack)) ||
          (cutsY && (rect.bottom > box.bottom + slack || rect.top < box.top - slack)));
        if (outside) {
          found.push(text.textContent.trim());
          break;
        }
        if (/(auto|scroll)/.test(style.overflowX + style.overflowY)) break;
      }
    }
    if (document.documentElement.scrollWidth > innerWidth) found.push("the page is wider than the window");
    return found;
  }

  const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
    .getContext("2d", { willReadFrequently: true });
  const cache = new Map();
  // [red, green, blue, alpha], the first three 0 to 255: whatever notation the browser computes.
  function channels(colour) {
    if (!cache.has(colour)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      cache.set(colour, [r, g, b, a / 255]);
    }
    return cache.get(colour);
  }
  const over = (top, alpha, below) => top.slice(0, 3).map((value, i) => alpha * value + (1 - alpha) * below[i]);
  // WCAG 2.2, "relative luminance" and "contrast ratio".
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  function ground(node) {
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0) layers.unshift(colour);
      if (colour[3] === 1) break;
    }
    return layers.reduce((below, layer) => over(layer, layer[3], below), [255, 255, 255]);
  }

  // Text whose contrast with its ground is below `least`; what is disabled is exempt.
  function faint(least = 4.5) {
    const found = [];
    for (const [text, parent] of texts()) {
      if (parent.closest("[disabled], [aria-disabled=true]")) continue;
      const style = getComputedStyle(parent);
      const colour = channels(parent instanceof SVGElement ? style.fill : style.color);
      let alpha = colour[3];
      for (let at = parent; at; at = at.parentElement) alpha *= Number(getComputedStyle(at).opacity);
      const below = ground(parent), front = over(colour, alpha, below);
      const [dark, light] = [luminance(front), luminance(below)].sort((a, b) => a - b);
      const ratio = (light + 0.05) / (dark + 0.05);
      if (ratio < least) found.push(`${ratio.toFixed(2)}: ${text.textContent.trim()}`);
    }
    return found;
  }

  const nameOf = (node) => node.getAttribute("aria-label") || node.title || node.textContent.trim() || node.tagName;
  const marked = new WeakSet();
  // Notes what has the focus; true while that is a part of the page not yet seen.
  function step() {
    const node = document.activeElement;
    if (!node || node === document.body || marked.has(node)) return false;
    marked.add(node);
    return true;
  }
  // What can be operated by a pointer and was not noted. A group of radio buttons is one stop, then arrow keys.
  function unreached() {
    const all = document.querySelectorAll(
      ".stApp :is(button, a[href], input, select, textarea, summary, [role=button], [role=slider], [role=tab])");
    return [...all].filter((node) => {
      const group = node.closest("[role=radiogroup], [role=group], [role=tablist], [role=toolbar]");
      const nearby = [node, ...node.querySelectorAll("*")];
      if (node.disabled || !shown(node) || node.closest("[aria-hidden=true]")) return false;
      if (group && [...group.querySelectorAll("*")].some((other) => marked.has(other))) return false;
      return !nearby.some((other) => marked.has(other));
    }).map(nameOf);
  }

  window.kvatlasChecks = { clipped, faint, step, unreached };
})();
