// Opens each page in a frame of each width, and says what is wrong there. The pages forbid scripts, so this one stands outside of them.
"use strict";

// Two boxes meet where they have more than a pixel in common.
const meet = (a, b) =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
const said = (element) => JSON.stringify(element.textContent.trim().slice(0, 60));

// Luminance and contrast as WCAG 2.1 defines them.
const channels = (color) => color.match(/[\d.]+/g).map(Number);
const luminance = (color) => {
  const [r, g, b] = channels(color).slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => {
  const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (light + 0.05) / (dark + 0.05);
};

// Where a path goes on the screen, every two pixels.
const places = (path) => {
  const [matrix, all] = [path.getScreenCTM(), path.getTotalLength()];
  const steps = Math.max(1, Math.ceil(all / 2));
  return Array.from({ length: steps + 1 }, (_, n) => path.getPointAtLength((all * n) / steps).matrixTransform(matrix));
};

function check(frame, width) {
  const [document, style] = [frame.contentDocument, (of) => frame.contentWindow.getComputedStyle(of)];
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const wrong = [];
  const box = (element) => element.getBoundingClientRect();
  const isShown = (element) => element.checkVisibility({ visibilityProperty: true }) && box(element).width > 0;
  all("details").forEach((details) => (details.open = true));

  if (document.documentElement.scrollWidth > width) wrong.push(`overflow: the page is ${document.documentElement.scrollWidth} wide`);
  const page = style(document.body).backgroundColor;
  for (const element of all("h1, h2, h3, p, li, dt, dd, summary, figcaption, td, th, caption, a, text, tspan").filter(isShown)) {
    const { left, right } = box(element);
    if (!element.closest(".scroll") && (left < 0 || right > width + 0.5)) wrong.push(`overflow: ${said(element)} ends at ${right}`);
    const color = element.namespaceURI.endsWith("svg") ? style(element).fill : style(element).color;
    if (element.textContent.trim() && contrast(color, page) < 4.5) wrong.push(`contrast: ${said(element)}, ${color} on ${page}`);
  }

  const plots = all("svg.plot").filter((plot) => style(plot).display !== "none");
  for (const plot of plots) {
    const title = plot.getAttribute("aria-label");
    const report = (what) => wrong.push(`${what}, in "${title}"`);
    const marks = all(".mark", plot);
    const ink = all(".line path, .dot, .ring", plot).filter((shape) => box(shape).width + box(shape).height > 0);
    if (box(plot).width < 140 || box(plot).height < 60 || marks.length === 0 || ink.length === 0) report("empty: there is no plot");
    const lines = all(".line path, .lead", plot).map((path) => ({ path, points: places(path) }));
    const dots = all(".dot, .ring", plot).map((dot) => ({ dot, area: box(dot) }));
    const free = (text, what) => {
      const area = box(text);
      const inside = (p) => p.x > area.left + 1 && p.x < area.right - 1 && p.y > area.top + 2 && p.y < area.bottom - 2;
      if (lines.some(({ points }) => points.some(inside))) report(`covered: ${what} ${said(text)} lies over a line`);
      if (dots.some((one) => meet(one.area, area))) report(`covered: ${what} ${said(text)} lies over a point`);
    };
    const texts = all("text", plot).filter(isShown);
    texts.forEach((text, at) => {
      for (const other of texts.slice(0, at)) if (meet(box(text), box(other))) report(`overlap: ${said(text)} and ${said(other)}`);
      free(text, "the text");
    });
    for (const mark of marks) {
      if (!mark.getAttribute("aria-label")) report("unnamed: a mark says nothing to who does not see it");
      mark.focus();
      const readout = mark.querySelector(".readout text");
      if (!isShown(readout)) {
        report(`silent: ${said(mark)} shows no figures where it is focused`);
        continue;
      }
      const area = box(readout);
      if (area.left < 0 || area.right > width + 0.5) report(`overflow: the figures ${said(readout)} end at ${area.right}`);
      for (const other of all("text", plot)) if (other !== readout && isShown(other) && meet(area, box(other))) report(`overlap: the figures ${said(readout)} and ${said(other)}`);
      free(readout, "the figures");
      mark.blur();
    }
  }
  for (const element of all("[tabindex]")) if (element.tabIndex !== 0) wrong.push(`order: Tab reaches ${said(element)} out of turn`);
  return { plots: plots.length, marks: plots.flatMap((plot) => all(".mark", plot)).length, page, wrong };
}

async function run(pages, widths) {
  const found = [];
  for (const page of pages) {
    for (const width of widths) {
      const frame = document.createElement("iframe");
      frame.style = `width: ${width}px; height: 900px; border: 0`;
      frame.src = page;
      document.body.replaceChildren(frame);
      await new Promise((loaded) => (frame.onload = loaded));
      found.push({ name: page, width, ...check(frame, width) });
    }
  }
  const result = document.createElement("pre");
  result.id = "found";
  result.textContent = JSON.stringify(found);
  document.body.replaceChildren(result);
}
