// Making elements. Text goes in as text, never as markup.

/** An HTML element. `options` are properties, `class`, or attributes (names with "-", and "role"). */
export function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const ICONS = {
  previous: "M15 5l-7 7 7 7",
  next: "M9 5l7 7-7 7",
  play: "M7 5l11 7-11 7z",
  pause: "M8 5v14M16 5v14",
  latest: "M6 5l7 7-7 7M18 5v14",
};

/** A button that shows an icon and is called `label`. */
export function iconButton(name, label, onclick) {
  const button = element("button", { type: "button", class: "icon", onclick });
  setIcon(button, name, label);
  return button;
}

/** Changes what an icon button shows and is called. */
export function setIcon(button, name, label) {
  button.replaceChildren(svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: ICONS[name] })));
  button.setAttribute("aria-label", label);
  button.title = label;
}

/** Calls `draw` at most once a frame, however often it is asked for. */
export function oncePerFrame(draw) {
  let waiting = 0;
  return () => {
    waiting ||= requestAnimationFrame(() => {
      waiting = 0;
      draw();
    });
  };
}

/** Whether the reader wants things to stand still. */
export function prefersStillness() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** A number with so many decimals, or a dash where there is none. */
export function figure(value, decimals = 0) {
  return value === null || !Number.isFinite(value) ? "–" : value.toFixed(decimals);
}
