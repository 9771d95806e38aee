// The timelines on a canvas: zoom, pan, hover, and one op held in all timelines at once.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const stage = document.getElementById("stage"), still = document.getElementById("still");
  const scroll = document.getElementById("scroll"), canvas = document.getElementById("chart");
  const tip = document.getElementById("tip"), details = document.getElementById("details");
  const pen = canvas.getContext("2d");
  if (!pen || !data.timelines.some((timeline) => timeline.lanes.some((lane) => lane.op.length))) return;
  stage.hidden = false;
  still.hidden = true;

  // ---- what is shown -------------------------------------------------------------------------------------
  const NAME = 0, ROLE = 1, LAYER = 2, TARGET = 3;
  const rows = [], headings = [], runs = data.timelines.map(() => new Map());
  const most = Math.max(...data.timelines.map((timeline) => timeline.lanes.length));
  const ROW = most <= 8 ? 28 : most <= 32 ? 18 : 11, GAP = most <= 8 ? 6 : 3, TOP = 34, RIGHT = 18;
  let y = TOP;
  data.timelines.forEach((timeline, index) => {
    const heading = { y: y + 16, text: timeline.name, note: timeline.summary, top: y + 23, bottom: 0 };
    headings.push(heading);
    y += 28;
    for (const lane of timeline.lanes) {
      rows.push({ index, timeline, lane, y });
      lane.op.forEach((op, at) => runs[index].set(op, { row: rows.length - 1, at }));
      y += ROW + GAP;
    }
    heading.bottom = y - GAP + 5;
    y += 12;
  });
  const height = y + 26;
  const before = new Map(), after = new Map();
  const link = (map, from, to) => (map.get(from) || map.set(from, []).get(from)).push(to);
  for (let i = 0; i < data.edges.length; i += 2) {
    link(before, data.edges[i + 1], data.edges[i]);
    link(after, data.edges[i], data.edges[i + 1]);
  }
  const longest = Math.max(...data.timelines.map((t) => t.makespan), data.lower || 0, 1e-3);
  const FULL = longest * 1.015, LEAST = Math.min(FULL, Math.max(longest * 1e-5, 0.05));
  const hidden = new Set();
  let from = 0, to = FULL, hover = null, held = null, left = 100, width = 800, colours = {}, waiting = false;

  // ---- words ---------------------------------------------------------------------------------------------
  const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 9 });
  const time = (us) => us >= 999500 ? digits(us / 1e6) + " s" : us >= 999.5 ? digits(us / 1e3) + " ms" : digits(us) + " µs";
  const share = (part) => (part * 100 >= 9.95 ? (part * 100).toFixed(0) : (part * 100).toFixed(part > 0.001 ? 1 : 2)) + "%";
  const role = (op) => data.roles[data.ops[op][ROLE]];
  const fit = (text, room) => {
    // Names of ops begin alike and end differently, so the beginning goes first.
    if (pen.measureText(text).width <= room) return text;
    let keep = Math.floor((text.length * room) / pen.measureText(text).width);
    while (keep > 4 && pen.measureText("…" + text.slice(-keep)).width > room) keep--;
    return keep > 4 ? "…" + text.slice(-keep).replace(/^[._/]+/, "") : "";
  };
  const lines = (found) => {
    const { lane, timeline } = rows[found.row], op = lane.op[found.at], entry = data.ops[op];
    const start = lane.start[found.at], length = lane.end[found.at] - start;
    const elsewhere = data.timelines
      .map((other, index) => [other, runs[index].get(op)])
      .filter(([other, run]) => other !== timeline && run)
      .map(([other, run]) => `${other.name}: ${time(rows[run.row].lane.end[run.at] - rows[run.row].lane.start[run.at])}`);
    return [
      entry[NAME],
      [role(op).label, data.layers[entry[LAYER]], data.targets[entry[TARGET]]].filter(Boolean).join(" · "),
      `${time(length)}, ${share(length / (timeline.makespan || 1))} of ${timeline.name}, on ${lane.name} at ${time(start)}`,
      elsewhere.length ? "in " + elsewhere.join(", in ") : "",
    ].filter(Boolean);
  };

  // ---- drawing -------------------------------------------------------------------------------------------
  const X = (us) => left + ((us - from) / (to - from)) * width;
  const firstEnding = (lane, us) => {
    let low = 0, high = lane.end.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.end[middle] < us) low = middle + 1; else high = middle;
    }
    return low;
  };
  const look = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue("--" + name).trim();
    for (const name of ["paper", "rest", "line", "ink", "soft"]) colours[name] = read(name);
    for (const { name } of data.roles) {
      colours[name] = read("role-" + name);
      colours["on-" + name] = read("on-" + name);
    }
    colours.font = getComputedStyle(document.body).fontFamily;
  };
  const font = (size, weight = 400) => { pen.font = `${weight} ${size}px ${colours.font}`; };
  const halo = (text, x, at) => {
    pen.strokeStyle = colours.paper;
    pen.lineWidth = 5;
    pen.lineJoin = "round";
    pen.strokeText(text, x, at);
  };
  const write = (text, x, at, colour, align = "left") => {
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.fillText(text, x, at);
  };
  const ticks = () => {
    const raw = ((to - from) / width) * 110, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
    const [scale, unit] = to >= 1e6 ? [1e6, "s"] : to >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    const places = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
    font(11.5);
    for (let n = Math.ceil(from / step - 1e-9); n * step <= to; n++) {
      const x = X(n * step);
      pen.fillStyle = colours.line;
      for (const { top, bottom } of headings) pen.fillRect(Math.round(x), top, 1, bottom - top);
      write(n ? (n * step / scale).toFixed(Math.min(9, places)) + " " + unit : "0", x, height - 10, colours.soft, "center");
    }
  };
  const bars = (row) => {
    const { lane, timeline } = row;
    const end = Math.min(X(timeline.makespan), left + width);
    pen.fillStyle = colours.rest;
    if (end > left) pen.fillRect(left, row.y, end - left, ROW);
    let drawn = -1;
    font(11.5);
    for (let at = firstEnding(lane, from); at < lane.op.length && lane.start[at] < to; at++) {
      const x0 = Math.max(left, X(lane.start[at])), x1 = Math.min(left + width, X(lane.end[at]));
      if (x1 - x0 < 0.6 && x1 - drawn < 0.6) continue;
      drawn = x1;
      const { name } = role(lane.op[at]), wide = x1 - x0;
      pen.globalAlpha = hidden.has(name) ? 0.13 : 1;
      pen.fillStyle = colours[name];
      pen.fillRect(x0, row.y, Math.max(0.6, wide > 3 ? wide - 0.7 : wide), ROW);
      if (wide > 44 && ROW >= 16) {
        const text = fit(data.ops[lane.op[at]][NAME], wide - 12);
        if (text) write(text, x0 + 6, row.y + ROW / 2 + 4, colours["on-" + name]);
      }
    }
    pen.globalAlpha = 1;
  };
  const outline = (found, line) => {
    const { lane, y } = rows[found.row];
    const x0 = X(lane.start[found.at]), x1 = X(lane.end[found.at]);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = line;
    pen.strokeRect(x0 - 1, y - 1.5, Math.max(2, x1 - x0 + 1.3), ROW + 3);
  };
  const curve = (a, b) => {
    const one = rows[a.row], two = rows[b.row];
    const x0 = X(one.lane.end[a.at]), x1 = X(two.lane.start[b.at]), same = one === two;
    const y0 = same ? one.y : one.y + ROW / 2, y1 = same ? two.y : two.y + ROW / 2;
    const bend = same ? (x1 - x0) / 4 : Math.max(8, Math.min(90, Math.abs(x1 - x0) / 2));
    const lift = same ? Math.min(22, 4 + Math.abs(x1 - x0) / 8) : 0;
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.bezierCurveTo(x0 + bend, y0 - lift, x1 - bend, y1 - lift, x1, y1);
    pen.stroke();
  };
  const connections = (found) => {
    const { index, lane } = rows[found.row], op = lane.op[found.at];
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.3;
    pen.globalAlpha = 0.65;
    for (const other of before.get(op) || []) if (runs[index].has(other)) curve(runs[index].get(other), found);
    for (const other of after.get(op) || []) if (runs[index].has(other)) curve(found, runs[index].get(other));
    pen.globalAlpha = 1;
  };
  const draw = () => {
    waiting = false;
    pen.clearRect(0, 0, left + width + RIGHT, height);
    ticks();
    for (const row of rows) {
      font(ROW >= 16 ? 12 : 9.5);
      write(fit(row.lane.name, left - 30), left - 10, row.y + ROW / 2 + 4, colours.soft, "right");
      bars(row);
    }
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width + RIGHT, height);
    pen.clip();
    const marked = held || hover;
    if (marked) {
      const op = rows[marked.row].lane.op[marked.at];
      if (held) connections(held);
      for (const map of runs) if (map.has(op)) outline(map.get(op), held ? 2 : 1.5);
    }
    if (data.lower !== null && X(data.lower) >= left && X(data.lower) <= left + width) {
      const x = X(data.lower), label = data.lower_label + " " + time(data.lower);
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 1.5;
      pen.setLineDash([5, 4]);
      pen.beginPath();
      pen.moveTo(x, 10);
      pen.lineTo(x, height - 26);
      pen.stroke();
      font(12, 600);
      const flip = x + 8 + pen.measureText(label).width > left + width;
      write(label, flip ? x - 7 : x + 7, 19, colours.ink, flip ? "right" : "left");
    }
    pen.restore();
    pen.textAlign = "left";
    for (const { y, text, note } of headings) {
      font(13, 600);
      const room = pen.measureText(text).width;
      halo(text, 16, y);
      write(text, 16, y, colours.ink);
      font(12.5);
      const fits = pen.measureText(note).width <= left + width + RIGHT - 32 - room;
      const shown = fits ? note : note.split(/[:,]/)[0];
      halo(shown, 26 + room, y);
      write(shown, 26 + room, y, colours.soft);
    }
  };
  const redraw = () => { if (!waiting) { waiting = true; requestAnimationFrame(draw); } };
  const resize = () => {
    const ratio = window.devicePixelRatio || 1, whole = scroll.clientWidth;
    look();
    font(12);
    left = 34 + Math.min(whole * 0.25, Math.max(40, ...rows.map((row) => pen.measureText(row.lane.name).width)));
    width = Math.max(60, whole - left - RIGHT);
    canvas.width = Math.round(whole * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    // A canvas of a new size is empty: without a drawing at once, one frame would show it so.
    draw();
  };

  // ---- moving --------------------------------------------------------------------------------------------
  const view = (start, length) => {
    length = Math.min(FULL, Math.max(LEAST, length));
    start = Math.min(FULL - length, Math.max(0, start));
    const moved = start !== from || start + length !== to;
    [from, to] = [start, start + length];
    redraw();
    return moved;
  };
  const zoom = (factor, x = left + width / 2) => {
    const centre = from + ((x - left) / width) * (to - from), length = Math.min(FULL, Math.max(LEAST, (to - from) * factor));
    return view(centre - ((x - left) / width) * length, length);
  };
  const pan = (pixels) => view(from + (pixels / width) * (to - from), to - from);
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const at = (x, y) => {
    const row = rows.findIndex((candidate) => y >= candidate.y && y <= candidate.y + ROW);
    if (row < 0 || x < left) return null;
    const { lane } = rows[row], us = from + ((x - left) / width) * (to - from), near = ((to - from) / width) * 2;
    const first = firstEnding(lane, us - near);
    let best = null, least = near;
    for (let i = first; i < lane.op.length && lane.start[i] <= us + near; i++) {
      const away = Math.max(lane.start[i] - us, us - lane.end[i], 0);
      if (best === null || away < least) [best, least] = [{ row, at: i }, away];
      if (away === 0) break;
    }
    return best;
  };
  const show = (found, x, y) => {
    tip.hidden = !found;
    if (!found) return;
    const [first, ...rest] = lines(found), name = document.createElement("b");
    name.textContent = first;
    tip.replaceChildren(name, ...rest.flatMap((line, n) => (n ? [document.createElement("br"), line] : [line])));
    tip.style.left = Math.max(8, Math.min(x + 16, scroll.clientWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(scroll.scrollTop + 4, y + 20 + tip.offsetHeight > scroll.scrollTop + scroll.clientHeight ? y - tip.offsetHeight - 12 : y + 20) + "px";
  };
  const hold = (found) => {
    held = found;
    const waits = found ? (before.get(rows[found.row].lane.op[found.at]) || []).length : 0;
    details.textContent = found ? lines(found).join(" — ") + (waits ? ` — waits for ${waits} ${waits > 1 ? "ops" : "op"}` : "") : "";
    redraw();
  };

  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const unit = event.deltaMode ? 30 : 1, amount = (sideways ? event.deltaX || event.deltaY : event.deltaY) * unit;
    if (sideways ? pan(amount) : zoom(Math.exp(Math.max(-200, Math.min(200, amount)) * 0.0022), place(event)[0])) event.preventDefault();
    show(null);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (drag) {
      drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
      if (drag.moved) { show(null); view(drag.from - ((event.clientX - drag.x) / width) * (to - from), to - from); }
      return;
    }
    hover = at(x, y);
    show(hover, x, y);
    redraw();
  });
  canvas.addEventListener("pointerup", (event) => { if (drag && !drag.moved) hold(at(...place(event))); drag = null; });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { hover = null; show(null); redraw(); });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowLeft: () => pan(-90), ArrowRight: () => pan(90), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7),
      0: () => view(0, FULL), Home: () => view(0, FULL), Escape: () => hold(null),
    }[event.key];
    if (act) { act(); event.preventDefault(); }
  });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => ({ in: () => zoom(0.6), out: () => zoom(1 / 0.6), all: () => view(0, FULL) })[button.dataset.zoom]());
  }
  document.getElementById("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = event.target.elements.op, word = field.value.trim().toLowerCase();
    const named = (test) => [...runs].reverse().flatMap((map) => [...map]).find(([op]) => test(data.ops[op][NAME].toLowerCase()));
    const found = word && (named((name) => name === word) || named((name) => name.includes(word)));
    field.classList.toggle("missing", Boolean(word && !found));
    if (!found) return hold(null);
    const { lane } = rows[found[1].row], start = lane.start[found[1].at], length = lane.end[found[1].at] - start;
    view(start + length / 2 - Math.max(length * 6, FULL / 20) / 2, Math.max(length * 6, FULL / 20));
    hold(found[1]);
  });
  for (const { name, label } of data.roles.filter((entry) => entry.used)) {
    const button = document.createElement("button"), swatch = document.createElement("span");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    swatch.className = "swatch";
    swatch.style.background = `var(--role-${name})`;
    button.append(swatch, label);
    button.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      redraw();
    });
    document.getElementById("keys").append(button);
  }
  new ResizeObserver(resize).observe(scroll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
  resize();
})();
