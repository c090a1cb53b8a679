// Faults of a view for people who do not use a mouse or do not see the screen; axe-core checks more where it is there.
const faults = [];
const every = (selector) => [...document.querySelectorAll(selector)];
const shown = (one) => one.checkVisibility({ visibilityProperty: true });
const place = (one) => one.outerHTML.slice(0, 120);
const check = (selector, message, passes) => {
  for (const one of every(selector)) if (shown(one) && !passes(one)) faults.push(`${message}: ${place(one)}`);
};
const name = (one) => (one.getAttribute("aria-label") || one.textContent || one.getAttribute("title") || "").trim();

check("a[href], button, summary, [role=slider], [role=region], nav, aside", "has no name", (one) => name(one) !== "");
check("input, select", "has no label", (one) => [...(one.labels ?? [])].some((label) => name(label) !== ""));
check("img, svg", "has no alternative", (one) => one.getAttribute("alt") || one.getAttribute("aria-label"));
check("table", "has no caption", (one) => one.caption && name(one.caption) !== "");
check("th", "has no scope", (one) => one.scope === "col" || one.scope === "row");
check("[tabindex]", "changes the order of the focus", (one) => one.tabIndex <= 0);
check("[style]", "an attribute that the policy refuses", (one) => !one.hasAttribute("onclick"));
check("button, a[href], input, select, summary", "too small to hit", (one) => {
  const { width, height } = one.getBoundingClientRect();
  return one.closest("td, th, dd, li, h2, label, .skip, nav") || (width >= 20 && height >= 20);
});
for (const selector of ["header", "main", "nav", "h1", "[role=status]"]) {
  if (!document.querySelector(selector)) faults.push(`there is no ${selector}`);
}
if (every("h1").length !== 1 || every("main").length !== 1) faults.push("one heading and one main part are needed");
if (!document.documentElement.lang || !document.title) faults.push("no language or no title");
const ids = every("[id]").map((one) => one.id);
if (new Set(ids).size !== ids.length) faults.push(`an id is there twice: ${ids}`);
for (const table of every("table")) {
  const sorted = [...table.querySelectorAll("th[aria-sort]")].filter((one) => one.getAttribute("aria-sort") !== "none");
  if (sorted.length > 1) faults.push(`two columns are sorted: ${place(table)}`);
}

// Contrast of text, by WCAG 2.2: 4.5, or 3 for large text. Colors come as the browser computes them.
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const channels = (color) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, alpha / 255];
};
const over = (top, bottom) => [0, 1, 2].map((i) => top[i] * top[3] + bottom[i] * (1 - top[3])).concat(1);
const background = (one) => {
  const layers = [];
  for (let at = one; at; at = at.parentElement) layers.push(channels(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((bottom, top) => over(top, bottom), [255, 255, 255, 1]);
};
const luminance = (color) => {
  const [red, green, blue] = color.slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
for (const one of every("body *")) {
  const hasText = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!hasText || !shown(one) || one.closest(".unseen, .skip, :disabled, svg, noscript, option")) continue;
  const style = getComputedStyle(one);
  const behind = background(one);
  const [light, dark] = [luminance(over(channels(style.color), behind)), luminance(behind)].sort((a, b) => b - a);
  const size = parseFloat(style.fontSize);
  const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
  const contrast = (light + 0.05) / (dark + 0.05);
  if (contrast < needed) faults.push(`contrast ${contrast.toFixed(2)} of ${style.color}: ${place(one)}`);
}
return faults;
